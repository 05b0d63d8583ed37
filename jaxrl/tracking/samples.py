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
        write_lines(path, [e for e in read_metrics(path) if e["step"] <= start_step])

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
        for i in _chosen(rollouts):
            rollout, size = rollouts[i], _MOST_TOKENS
            entry = {
                "step": step,
                "group": rollout.group,
                "prompt": self._tokenizer.decode(rollout.prompt, skip_special_tokens=False),
                "answer": None if (answer := self._answer(rollout.group)) is None else str(answer),
                "reward": _finite(rollout.reward),
                "parts": dict(zip(self._parts, map(_finite, rollout.components), strict=False)),
                "length": len(rollout.completion),
                "truncated": rollout.truncated,
                "tokens": token_texts(self._tokenizer, rollout.completion[:size].tolist()),
                "advantages": _numbers(advantages[i], rollout)[:size],
                "probabilities": _numbers(np.exp(rollout.logprobs), rollout)[:size],
            }
            for name, values in probed.items():
                entry[name] = _numbers(values[i], rollout)[:size]
            lines.append(json.dumps(entry) + "\n")
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(lines)


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


def _chosen(rollouts: Sequence[Rollout]) -> list[int]:
    """Returns indices of a few completions of a few prompts, by prompt."""
    groups: dict[int, list[int]] = {}
    for i, rollout in enumerate(rollouts):
        groups.setdefault(rollout.group, []).append(i)
    members = list(groups.values())
    means = [float(np.mean([rollouts[i].reward for i in group])) for group in members]
    return [
        group[i]
        for group in (members[place] for place in _spread(means, count=_PROMPTS))
        for i in _spread([rollouts[i].reward for i in group], count=_COMPLETIONS)
    ]


def _spread(rewards: Sequence[float], *, count: int) -> list[int]:
    """Returns at most `count` indices, evenly from the lowest to the highest reward."""
    order = np.argsort(np.nan_to_num(np.array(rewards), nan=-np.inf), kind="stable")
    places = np.linspace(0, len(order) - 1, min(count, len(order)))
    return [int(order[round(place)]) for place in places]
