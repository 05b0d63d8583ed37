"""Logged samples: completions of a few prompts with numbers for each token, for people to read."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.advantages import Advantages
from jaxrl.core import Rollout
from jaxrl.data import Tokenizer
from jaxrl.tracking.tracker import read_metrics, write_lines

_DIGITS = 5
_PROMPTS = 2  # per step
_COMPLETIONS = 4  # per prompt: a reader compares them at a glance
_HELD_OUT = 8  # prompts, the same at every evaluation
_MOST_TOKENS = 512  # per completion: the page of `jaxrl report` holds hundreds of completions
_UNKNOWN = "\ufffd"  # replaces bytes that are not a character
_MOST_HELD = 16  # tokens that may wait for the end of a character; valid text needs few


class Samples:
    """Appends to samples.jsonl; drops entries that a killed run wrote after its checkpoint."""

    def __init__(
        self,
        path: Path,
        *,
        tokenizer: Tokenizer,
        answer: Callable[[int], Any],
        parts: Sequence[str],
        start_step: int,
    ) -> None:
        """Opens the file of a run that has trained for `start_step` steps. `answer` maps the number
        of a prompt to its reference answer or None; `parts` names the parts of the reward."""
        self._path, self._tokenizer, self._answer, self._parts = path, tokenizer, answer, parts
        # A run that begins at step 0 evaluates there again.
        kept = [e for e in read_metrics(path) if 0 < start_step >= e["step"]]
        write_lines(path, kept)

    def write(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        *,
        advantages: Advantages,
        probed: Mapping[str, Sequence[np.ndarray]],
    ) -> None:
        """Logs a few completions of a few prompts, evenly spread over the rewards. `probed` has
        further numbers of the tokens: {key: f32[C] for each rollout}."""
        lines = []
        for i, siblings in _chosen(rollouts):
            rollout, known = rollouts[i], [r for r in siblings if not np.isnan(r)]
            entry = self._entry(step, rollout, answer=self._answer(rollout.group)) | {
                "parts": dict(zip(self._parts, map(_finite, rollout.components), strict=False)),
                "group_size": len(siblings),
                "group_mean": float(np.mean(known)) if known else None,
                "advantages": _numbers(advantages[i], rollout)[:_MOST_TOKENS],
            }
            for name, values in probed.items():
                entry[name] = _numbers(values[i], rollout)[:_MOST_TOKENS]
            lines.append(entry)
        self._append(lines)

    def write_held_out(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        *,
        rewards: Sequence[float],
        examples: Sequence[Mapping[str, Any]],
    ) -> None:
        """Logs an evaluation's completions of a few held-out prompts, always the same. There is one
        rollout, one reward (NaN if it failed) and one row of the data for each prompt."""
        size = len(rollouts)
        chosen = sorted({round(place) for place in np.linspace(0, size - 1, min(_HELD_OUT, size))})
        self._append(
            [
                self._entry(step, rollouts[i], answer=examples[i].get("answer"))
                | {"reward": _finite(float(rewards[i])), "held_out": True}
                for i in chosen
            ]
        )

    def _entry(self, step: int, rollout: Rollout, *, answer: Any) -> dict[str, Any]:
        return {
            "step": step,
            "group": rollout.group,
            "prompt": self._tokenizer.decode(rollout.prompt, skip_special_tokens=False),
            "answer": None if answer is None else str(answer),
            "reward": _finite(rollout.reward),
            "length": len(rollout.completion),
            "truncated": rollout.truncated,
            "tokens": token_texts(self._tokenizer, rollout.completion[:_MOST_TOKENS].tolist()),
            "actions": rollout.action_mask[:_MOST_TOKENS].tolist(),
            "probabilities": _numbers(np.exp(rollout.logprobs), rollout)[:_MOST_TOKENS],
        }

    def _append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in entries)


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns the text of every token; joined they equal the text of all tokens.

    A token decoded alone may have another text: tokenizers like Llama 2's drop a leading space, and
    a character may span several tokens. So each token is decoded after a few earlier ones, in
    linear time. The last token of a character gets its text; its other tokens get "".
    """
    texts = [""] * len(ids)
    start = known = 0  # ids[start:known] are context, their texts are known

    def text(end: int) -> str:
        return tokenizer.decode(list(ids[start:end]), skip_special_tokens=False)

    before = ""
    for i in range(len(ids)):
        now = text(i + 1)
        whole = len(now) > len(before) and not now.endswith(_UNKNOWN)
        if whole or i + 1 == len(ids) or i + 1 - known == _MOST_HELD:
            texts[i] = now[len(before) :]
            start, known = known, i + 1
            before = text(known)
    return texts


def _numbers(values: np.ndarray | float, rollout: Rollout) -> list[float | None]:
    """Returns a number for each token of a completion; None for observations."""
    whole = np.broadcast_to(np.asarray(values, np.float64), rollout.completion.shape)
    chosen = rollout.action_mask & np.isfinite(whole)
    return [
        float(f"{value:.{_DIGITS}g}") if known else None
        for value, known in zip(whole, chosen, strict=True)
    ]


def _finite(value: float) -> float | None:
    return None if np.isnan(value) else value


def _chosen(rollouts: Sequence[Rollout]) -> list[tuple[int, list[float]]]:
    """Returns indices of a few completions of a few prompts, by prompt, each with the rewards of
    all completions of its prompt."""
    groups: dict[int, list[int]] = {}
    for i, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group, []).append(i)
    members = list(groups.values())
    means = [float(np.mean([rollouts[i].reward for i in group])) for group in members]
    found = []
    for place in _spread(means, count=_PROMPTS):
        rewards = [rollouts[i].reward for i in members[place]]
        found += [(members[place][i], rewards) for i in _spread(rewards, count=_COMPLETIONS)]
    return found


def _spread(rewards: Sequence[float], *, count: int) -> list[int]:
    """Returns at most `count` indices, evenly from the lowest to the highest reward."""
    order = np.argsort(np.nan_to_num(np.array(rewards), nan=-np.inf), kind="stable")
    places = np.linspace(0, len(order) - 1, min(count, len(order)))
    return [int(order[round(place)]) for place in places]
