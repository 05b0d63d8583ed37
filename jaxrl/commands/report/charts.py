"""Charts of the page and the metrics that each one draws."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

# Metrics of some steps only; each value of a short curve is marked.
_SPARSE = ("eval/", "judge/", "probe/")


class Chart(NamedTuple):
    """One chart."""

    title: str  # heading
    note: str  # unit and remarks
    metrics: Mapping[str, str]  # {name of a metric: its label}
    # "fan" (quantiles, lowest first) and "stack" (parts of a sum) show one run, "lines" several.
    kind: Literal["lines", "fan", "stack"] = "lines"
    log: bool = False  # logarithmic scale
    right: str | None = None  # the metric with its own scale on the right
    rest: str | None = None  # prefix of further metrics to draw, except those in `left_out`
    left_out: Sequence[str] = ()  # metrics with the prefix `rest` that are not drawn
    hues: Sequence[str] = ()  # the page's names of the colours of a stack
    unless: str | None = None  # not drawn for runs with this metric, which another chart draws

    def names(self, known: Collection[str]) -> dict[str, str]:
        """Selects the known metrics that this chart draws, with their labels."""
        names = {name: label for name, label in self.metrics.items() if name in known}
        if self.rest is not None:
            found = (n for n in known if n.startswith(self.rest) and not n.endswith("/failed"))
            found = (n for n in found if n not in self.left_out)
            names |= {name: name.removeprefix(self.rest) for name in sorted(found)}
        return names


def _labels(prefix: str, *names: str) -> dict[str, str]:
    return {f"{prefix}/{name}": name for name in names}


def _quantiles(metric: str) -> dict[str, str]:
    return _labels(metric, "min", "p10", "p50", "p90", "max")


# The first chart is drawn large: the reward, or the loss of runs on texts or pairs.
_REWARD = Chart(
    "Reward",
    "mean of a step, and accuracy by greedy decoding",
    {"reward": "reward", "eval/accuracy": "held-out accuracy"},
    right="eval/accuracy",
)
_OUTCOMES = _labels("groups", "right", "mixed", "wrong")
_LOSS = _REWARD._replace(
    title="Loss",
    note="mean of a step, and the share of held-out pairs ranked correctly",
    metrics={"loss": "loss", "eval/accuracy": "held-out accuracy"},
)
# The other charts, by the group that folds. A chart compares runs, so metrics of different meaning
# have separate charts: KL to the reference is not divergence from the sampler.
_GROUPS: Mapping[str, Sequence[Chart]] = {
    "Learning": (
        Chart(
            "Groups by outcome",
            "prompts of a step: all completions right, some, none; only the mixed ones teach",
            _OUTCOMES,
            kind="stack",
            hues=tuple(_OUTCOMES.values()),
        ),
        Chart(
            "Reward, distribution",
            "minimum to maximum, 10 % to 90 %, median",
            _quantiles("reward"),
            kind="fan",
            unless="groups/right",
        ),
        Chart(
            "Reward, parts",
            "mean of each, before weighting",
            {},
            rest="reward/",
            left_out=("reward/std", *_quantiles("reward")),
        ),
        Chart(
            "Failed rewards",
            "completions that could not be scored: ignored in training, wrong when held out",
            {
                "reward/failed": "failed",
                "completions": "completions",
                "eval/failed": "held-out failed",
                "eval/completions": "held-out completions",
            },
        ),
        Chart(
            "Judge",
            "share of pairs that it orders as the reward does; its mean score on the right",
            {"judge/agreement": "agreement", "judge/score": "score"},
            right="judge/score",
        ),
        Chart(
            "Zero-variance groups",
            "all completions of a prompt earned the same reward",
            {"groups/zero_std": "zero variance", "groups/sampled": "groups"},
            unless="groups/right",
        ),
        Chart("Gradient norm", "before clipping", {"grad_norm": "gradient norm"}),
        Chart("Loss", "", {"loss": "loss"}),
        Chart("Learning rate", "", {"learning_rate": "learning rate"}),
        Chart(
            "Skipped steps, loss scale",
            "steps skipped so far for a gradient that was not finite; loss scale on the right",
            {"skipped_steps": "skipped", "loss_scale": "loss scale"},
            right="loss_scale",
        ),
    ),
    "Policy": (
        Chart("KL to the reference", "nats per token", {"kl/reference": "KL"}),
        Chart("Entropy", "nats per token, over sampled tokens", {"entropy/sampled": "entropy"}),
        Chart(
            "Clipping by side",
            "share of tokens",
            {"clip/low": "clipped below", "clip/high": "clipped above"},
        ),
        Chart(
            "Variety",
            "distinct 3-grams across prompts, identical completions, repetition within one",
            _labels("diversity", "distinct", "identical", "repetition"),
        ),
    ),
    "Mismatch of learner and sampler": (
        Chart(
            "Alpha against beta",
            "standard deviation of the policy's change and of numerical error, nats",
            {"probe/alpha_std": "alpha", "probe/beta_std": "beta"},
            log=True,
        ),
        Chart(
            "Phantom clipping",
            "share of tokens clipped, and clipped because of numerical error alone",
            _labels("probe", "clipped", "phantom"),
        ),
        Chart(
            "Mismatch of whole completions",
            "standard deviation of the log-ratio before any update, nats",
            {"probe/sequence_std": "std"},
            log=True,
        ),
        Chart(
            "Divergence at every step",
            "of the learner from the sampler on sampled tokens, nats",
            {"mismatch/k3_kl": "divergence"},
            log=True,
        ),
        Chart(
            "Chi-square at every step",
            "variance of the importance weight on sampled tokens",
            {"mismatch/chi2": "chi-square"},
            log=True,
        ),
        Chart(
            "Difference in probability at every step",
            "mean over sampled tokens",
            {"mismatch/prob_diff": "difference"},
            log=True,
        ),
        Chart(
            "Multiplicative error at every step",
            "factor between the probabilities; 1 is none",
            {"mismatch/token_mult_error": "factor"},
        ),
    ),
    "Lengths": (
        Chart(
            "Completion length, distribution", "tokens", _quantiles("completion_length"), kind="fan"
        ),
        Chart(
            "Truncated completions",
            "share that reached sampling.max_tokens",
            {"completion/truncated": "truncated"},
        ),
    ),
    "Time": (
        Chart(
            "Throughput",
            "tokens per second",
            {
                "tokens_per_second": "whole step",
                "tokens_per_second/sample": "sampling",
                "tokens_per_second/learn": "learning",
            },
        ),
        Chart(
            "Time per step",
            "seconds; without the first step after each start, which compiles",
            _labels("time", "wait", "sample", "reward", "score", "update", "publish"),
            kind="stack",
        ),
    ),
}


def drawn(known: Collection[str]) -> set[str]:
    """Returns the metrics that any chart draws."""
    charts = (_REWARD, *itertools.chain(*_GROUPS.values()))
    return {name for chart in charts for name in chart.names(known)}


def charts_of(known: Collection[str]) -> list[dict[str, Any]]:
    """Returns the charts with at least one known metric, in the page's form."""
    first = _LOSS if "reward" not in known and "loss" in known else _REWARD
    found = [("", first)]
    for group, charts in _GROUPS.items():
        found += [(group, c) for c in charts if not first.metrics.keys() & c.metrics.keys()]
    return [
        {
            "title": chart.title,
            "group": group,
            "note": chart.note,
            "metrics": names,
            "kind": chart.kind,
            "log": chart.log,
            "points": [name for name in names if name.startswith(_SPARSE)],
            "right": chart.right,
            "hues": list(chart.hues),
            "unless": chart.unless,
        }
        for group, chart in found
        if (names := chart.names(known))
    ]
