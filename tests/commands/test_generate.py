"""`jaxrl generate`: prompts from arguments or data, completions in their order."""

import io
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from jaxrl.cli import main
from jaxrl.commands import generate
from jaxrl.sampling.base import Completion
from tests import tiny


class Backwards:
    """A sampler that finishes the last prompt first. It answers with the prompt's last token."""

    def sample(self, prompts, params, *, group_size):
        for i in reversed(range(len(prompts))):
            for j in reversed(range(group_size)):
                tokens = np.repeat(prompts[i][-1:], j + 1)
                reason = "stop" if j == 0 else "length"
                yield Completion(i, j, tokens, tokens * 0.0, tokens * 0, reason)


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch) -> list[str]:
    tiny.write_checkpoint(tmp_path / "model")
    monkeypatch.setattr(generate, "open_policy", lambda *_, **__: nullcontext(Backwards()))
    own = ["--model.path", str(tmp_path / "model"), "--samples", "2"]
    return [*own, "--prompt.template", "text"]


def test_completions_come_in_the_order_of_prompts(arguments, capsys):
    assert main(["generate", *arguments, "1+2", "3+4"]) == 0
    blocks = ["1+2\n2", "1+2\n22 [truncated", "3+4\n4", "3+4\n44 [truncated"]
    shown = capsys.readouterr().out.split("\n\n")
    assert all(text.startswith(block) for text, block in zip(shown, blocks, strict=False))
    assert len(shown) == len(blocks) + 1


def test_a_long_prompt_that_cuts_the_completions_of_others_is_told(arguments, capsys):
    assert main(["generate", *arguments, "1", "2", "1+2+3"]) == 0
    told = capsys.readouterr().err
    assert "2 completions were cut at 123 tokens" in told
    assert "the longest prompt has 5 of the model's 128 tokens" in told
    for few in (["1", "1+2+3", "--sampling.max_tokens", "123"], ["1+2+3", "4+5+6"]):
        assert main(["generate", *arguments, *few]) == 0
        assert "were cut" not in capsys.readouterr().err


def test_without_prompts_it_ends_with_an_error(arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["generate", *arguments]) == 1
    assert "no prompts: give them as arguments, in data.path, or" in capsys.readouterr().err


def test_rows_of_data_are_completed(arguments, tmp_path, capsys, monkeypatch):
    chat = [{"role": "user", "content": "5+6"}]
    rows = [{"id": 7, "q": "1+2"}, {"id": 8, "q": chat}, {"id": 9, "q": "7+8"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "completions.jsonl"
    data = ["--data.path", str(tmp_path / "rows.jsonl"), "--data.prompt_key", "q"]
    assert main(["generate", *arguments, *data, "--out", str(out), "--data.limit", "1"]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines == [
        rows[0] | {"completion": "2", "finish_reason": "stop"},
        rows[0] | {"completion": "22", "finish_reason": "length"},
    ]
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"2 completions: {out}\n")

    assert main(["generate", *arguments, *data]) == 1  # a text cannot hold messages
    assert "rows.jsonl:2" in capsys.readouterr().err
    assert main(["generate", *arguments, *data, "1+2"]) == 1
    assert "prompts as arguments, and data.path" in capsys.readouterr().err

    def no_server(*_, **__):
        raise FileNotFoundError("no python there")

    monkeypatch.setattr(generate, "open_policy", no_server)
    before = out.read_text()
    assert main(["generate", *arguments, *data, "--out", str(out), "--data.limit", "1"]) == 1
    assert "no python there" in capsys.readouterr().err
    assert out.read_text() == before
