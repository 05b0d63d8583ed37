"""The `[judge]` table of a config."""

from pydantic import PositiveInt

from jaxrl.config.section import Section


class JudgeConfig(Section):
    """A second opinion on some completions, logged as `judge/...` beside their rewards and never
    trained on; see docs/rewards.md."""

    path: str | None = None
    """The judge: a function, named as in reward.path, or a file of scores that people write, such
    as `scores.jsonl`. None if absent."""

    every: PositiveInt = 10
    """Judge a sample after this many steps."""

    completions: PositiveInt = 32
    """Completions of a sample, rounded up to all those of a prompt."""

    @property
    def by_hand(self) -> bool:
        """True if `path` is a file of scores."""
        return self.path is not None and self.path.endswith(".jsonl")
