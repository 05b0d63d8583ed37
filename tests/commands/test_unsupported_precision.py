"""Each command refuses a dtype policy that its model cannot be computed with, before it reads the
model's weights."""

import json
import re

import pytest

from jaxrl.cli import main
from tests import tiny


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("experts")
    model, rows = directory / "model", directory / "rows.jsonl"
    tiny.write_checkpoint(model, config=tiny.MOE)
    (model / "model.safetensors").write_bytes(b"nobody reads this")
    row = {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c", "answer": "b"}
    rows.write_text("".join(json.dumps(row | {"prompt": f"{i}="}) + "\n" for i in range(20)))
    return {"model": str(model), "rows": str(rows), "state": str(directory / "state")}


POLICY = "fp32,blocks=int8"
MODEL, ROWS, ONE = ["--model.path", "{model}"], ["--data.path", "{rows}"], ["--precision", POLICY]
SHORT = ["--sampling.max_tokens", "8"]
COMMANDS = [
    ["sft", *MODEL, *ROWS, *ONE],
    ["dpo", *MODEL, *ROWS, *ONE],
    ["reward-model", *MODEL, *ROWS, *ONE],
    ["eval", *MODEL, *ROWS, "--data.eval_path={rows}", "--reward.path=exact_match", *SHORT, *ONE],
    ["train", *MODEL, *ROWS, "--reward.path=exact_match", *SHORT, *ONE],
    ["generate", "a", *MODEL, *ONE],
    ["doctor", "{model}", *ROWS, "--precisions", f'["fp32", "{POLICY}"]'],
    ["tinker", "{model}", "--state_dir", "{state}", *ONE],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_the_key_is_named(command, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([word.format(**files) for word in command]) == 1
    said = capsys.readouterr().err
    assert re.search(f"precisions? = {POLICY!r}: blocks=int8 is for decoders", said), said
