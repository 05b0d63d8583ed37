"""A second opinion on some completions: by a function at once, or by people in a file."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.core import Rollout, by_group, read_whole
from jaxrl.diagnostics import History, judge_metrics
from jaxrl.environments import last_turn, score
from jaxrl.tracking.tracker import read_metrics, write_lines
from jaxrl.training.rollouts.collect import RolloutSource, prompts_at
from jaxrl.training.timing import Numbers, is_due

Entry = dict[str, Any]  # a line of judge.jsonl
_PARTS = ("step", "group", "prompt", "answer", "completion", "reward")


class Judge:
    """Writes what is to be judged to judge.jsonl, and compares scores with rewards.

    Scores by hand are the same lines with a "score", in the file of judge.path. A sample counts
    once each of its completions has one; null stands for none.
    """

    def __init__(
        self,
        source: RolloutSource,
        directory: Path,
        *,
        history: History,
        note: Callable[[str], None],
        step: int,
    ) -> None:
        """Opens the file of a run that has trained for `step` steps; drops later lines."""
        self._source, self._note, self._path = source, note, directory / "judge.jsonl"
        self._scores = _Scores(source.config.judge.path or "", note)
        kept = [entry for entry in read_metrics(self._path) if entry["step"] <= step]
        write_lines(self._path, kept)
        known = set(history.series("judge/step").values)
        self._waiting: dict[int, list[Entry]] = {}
        for entry in kept:
            if entry["step"] not in known and "score" not in entry:
                self._waiting.setdefault(entry["step"], []).append(entry)

    def compare(self, step: int, rollouts: Sequence[Rollout]) -> Numbers:
        """Samples from the rollouts of a step if it is due. Returns the metrics "judge/..." of the
        oldest sample that has its scores by now; {} without one."""
        entries = []
        if is_due(self._source.config.judge.every, step):
            entries = self._sample(step, rollouts)
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in entries)
        if self._source.task.judge is not None:
            return _numbers(entries)
        if entries:
            self._waiting[step] = entries
        found = self._scores.read() if self._waiting else {}
        for one in sorted(self._waiting):
            if all(_key(entry) in found for entry in self._waiting[one]):
                judged = self._waiting.pop(one)
                return _numbers([e | {"score": found[_key(e)]} for e in judged])
        return {}

    def _sample(self, step: int, rollouts: Sequence[Rollout]) -> list[Entry]:
        """Draws whole groups of completions with a reward, and lets a function judge them."""
        source, wanted = self._source, self._source.config.judge.completions
        groups = list(by_group(r for r in rollouts if not np.isnan(r.reward)).values())
        order = np.random.default_rng((source.config.seed, step)).permutation(len(groups))
        chosen: list[Rollout] = []
        for i in order:
            if len(chosen) < wanted:
                chosen += groups[i]
        examples = prompts_at(source, {r.group for r in chosen})
        decode = source.task.tokenizer.decode
        texts = [decode(last_turn(r), skip_special_tokens=True) for r in chosen]
        entries = []
        for rollout, text in zip(chosen, texts, strict=True):
            answer = examples[rollout.group].get("answer")
            prompt = decode(rollout.prompt, skip_special_tokens=False)
            answer = None if answer is None else str(answer)
            row = (step, rollout.group, prompt, answer, text, rollout.reward)
            entries.append(dict(zip(_PARTS, row, strict=True)))
        if (judge := source.task.judge) is not None and chosen:
            scored = score([judge], texts, [examples[r.group] for r in chosen])
            if scored.first_failure is not None:
                self._note(f"step {step}: judge: {scored.first_failure}")
            for entry, value in zip(entries, scored.components[judge.name], strict=True):
                entry["score"] = None if np.isnan(value) else float(value)
        return entries


def _numbers(entries: Sequence[Entry]) -> Numbers:
    """Returns the metrics of one judged sample; {} without one."""
    if not entries:
        return {}
    columns = ([entry[name] for entry in entries] for name in ("reward", "score", "group"))
    rewards, scores, groups = columns
    found = judge_metrics(np.array(rewards, float), np.array(scores, float), np.array(groups))
    found["step"] = float(entries[0]["step"])
    return {f"judge/{name}": value for name, value in found.items()}


def _key(entry: Entry) -> tuple[str, str]:
    return entry["prompt"], entry["completion"]


class _Scores:
    """The scores that people wrote, by prompt and completion; read again when the file changes."""

    def __init__(self, path: str, note: Callable[[str], None]) -> None:
        self._path, self._note = Path(path), note
        self._seen: tuple[int, int] | None = None
        self._found: dict[tuple[str, str], float | None] = {}

    def read(self) -> dict[tuple[str, str], float | None]:
        """Returns {(prompt, completion): score}; notes the first line that cannot be read."""
        try:
            stat = os.stat(self._path)
        except OSError:
            return self._found
        if self._seen == (seen := (stat.st_mtime_ns, stat.st_size)):
            return self._found
        self._seen, self._found, wrong = seen, {}, list[str]()
        for number, line in enumerate((read_whole(self._path) or b"").splitlines(), start=1):
            try:
                entry = json.loads(line)
                value = entry["score"]
                known = value is None or bool(np.isfinite(float(value)))
                if not known:
                    raise ValueError(f"score is {value}")
                self._found[_key(entry)] = None if value is None else float(value)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                wrong.append(f"line {number}: {error!r}")
        if wrong:
            self._note(
                f"judge.path = {str(self._path)!r}: {len(wrong)} lines cannot be read, {wrong[0]}; "
                'each is a line of judge.jsonl with a "score", a number or null'
            )
        return self._found
