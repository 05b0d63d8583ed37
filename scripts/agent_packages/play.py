"""Plays episodes of agents on published packages, unmodified, at the gateway.

The packages get an environment of their own. The policy says given texts, with the tokenizer and
the chat template of Qwen3 (scripts/fetch_tokenizers.sh):

    python -m venv .venv-agents
    .venv-agents/bin/pip install openai anthropic openai-agents
    python scripts/agent_packages/play.py --python .venv-agents/bin/python
"""

import argparse
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from jaxrl.core import chains
from jaxrl.data import Example
from jaxrl.environments import (
    ContinuousScheduler,
    EnvironmentContext,
    EpisodeLimits,
    EpisodeRunner,
    builtin,
    environment_reward,
)
from jaxrl.sampling import Completion, Sampler, SamplingParams, Turn

HERE = Path(__file__).parent
TOKENIZER = HERE.parent.parent / ".cache" / "tokenizers" / "qwen3"
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>'
ASK = '<tool_call>\n{"name": "ask_adder", "arguments": {"input": "2+2"}}\n</tool_call><|im_end|>'
# The turns of the policy, and the number of conversations.
TURNS = {
    "chat.py": ([f"I add.\n{ADD}", "4<|im_end|>"], 1),
    "messages.py": ([f"I add.\n{ADD}", "4<|im_end|>"], 1),
    "sdk.py": ([ASK, ADD, "It is 4.<|im_end|>", "4<|im_end|>"], 2),
}


class Scripted(Sampler):
    """Says texts in turn."""

    version = 0

    def __init__(self, tokenizer: Any, texts: Sequence[str]) -> None:
        """Takes the texts of an episode."""
        self._tokenizer, self._texts = tokenizer, iter(texts)

    def sample_turns(self, turns: Sequence[Turn], params: SamplingParams) -> Iterator[Completion]:
        """Says the next text for each turn."""
        for turn in turns:
            tokens = self._tokenizer.encode(next(self._texts), add_special_tokens=False)
            zeros = np.zeros(len(tokens), np.float32)
            yield Completion(
                turn.prompt_index,
                turn.sample_index,
                np.array(tokens, np.int32),
                zeros,
                zeros.astype(np.int32),
                "stop",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="interpreter that has the packages")
    python = parser.parse_args().python
    tokenizer: Any = AutoTokenizer.from_pretrained(str(TOKENIZER))
    limits = EpisodeLimits(
        max_turns=8, max_tokens=500, max_prompt_tokens=1000, timeout=120.0, vocab_size=200_000
    )
    context = EnvironmentContext(tokenizer, {}, limits=limits)
    for script, (texts, conversations) in TURNS.items():
        command = [python, str(HERE / script), "What is {prompt}?"]
        make = functools.partial(builtin.gateway, context, command=command)
        row = {"prompt": "2+2", "answer": "4"}
        (rollout,), failure = EpisodeRunner(make, limits, ContinuousScheduler).run(
            {0: Example(np.array([0]), row, row)},
            sampler=Scripted(tokenizer, texts),
            params=SamplingParams(max_tokens=500),
            group_size=1,
        )
        if failure is not None:
            raise SystemExit(f"{script}: {failure}")
        parts = chains(rollout)
        said = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        trained = sum(int(part.action_mask.sum()) for part in parts)
        assert len(parts) == conversations, f"{script}: {len(parts)} sequences"
        assert trained == said, f"{script}: {trained} of {said} tokens are trained"
        reward = environment_reward(rollout)
        print(f"{script}: {len(parts)} sequences, {trained} tokens trained once, reward {reward}")


if __name__ == "__main__":
    main()
