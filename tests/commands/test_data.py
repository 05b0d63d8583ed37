"""`jaxrl data`, and the variables of templates that commands take over from a run."""

import json
import shutil
from pathlib import Path

import pytest

from jaxrl import cli
from jaxrl.commands.generate import GenerateConfig, as_trained
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from tests import published, tiny
from tests.data.conversations import CLOCK, talk

ROOT = Path(__file__).parents[2]


def model(directory: Path, name: str) -> str:
    """A model's directory without weights."""
    shutil.copytree(published.directory(name), directory)
    shutil.copy(ROOT / "configs/models/qwen3_0_6b/config.json", directory)
    return str(directory)


def test_the_conversation_is_shown_as_it_is_trained(tmp_path: Path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": talk(), "tools": [CLOCK]}) + "\n")
    arguments = ["data", "--sft", "--model.path", model(tmp_path / "m", "qwen3")]
    arguments += ["--data.path", f"{tmp_path}/a.jsonl", "--data.completion_key", "messages"]
    arguments += ["--data.prompt_key", "none"]
    assert cli.main([*arguments, "--data.template_kwargs.enable_thinking", "False"]) == 0
    out = capsys.readouterr().out
    tokenizer = published.tokenizer("qwen3")
    turns = [
        tokenizer.apply_chat_template(
            talk()[:length], tokenize=False, add_generation_prompt=length == 1, tools=[CLOCK]
        )
        for length in (1, 2)
    ]
    prompt = turns[0] + "<think>\n\n</think>\n\n"  # as the variable asks
    said = turns[1].removeprefix(prompt).removesuffix("\n")
    assert f"the first:\n\n{prompt}⟦{said}⟧\n" in out
    assert "a.jsonl, texts: 2; tokens: median " in out
    assert "dropped, because they have more tokens than train.row_length = 1024: 0" in out
    assert "completions end at: <|im_end|> (151645)" in out


def test_prompts_and_pairs_are_shown(tmp_path: Path, capsys):
    checkpoint = str(tiny.write_checkpoint(tmp_path / "m"))
    rows = [{"prompt": "a" * n, "answer": "", "chosen": "yes", "rejected": "no"} for n in (3, 4, 9)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["data", "--model.path", checkpoint, "--data.path", str(path)]
    assert (
        cli.main([*arguments, "--reward.path", "exact_match", "--data.max_prompt_tokens", "9"]) == 0
    )
    out = capsys.readouterr().out
    # The template adds five characters to each prompt.
    assert "prompts: 2; tokens: median 9, 99th percentile 9, longest 9" in out
    assert "max_prompt_tokens = 9: 1" in out
    assert "the first:\n\nu:aaa;a:\n" in out
    assert cli.main([*arguments, "--dpo"]) == 0
    out = capsys.readouterr().out
    assert "the first, chosen:\n\nu:aaa;a:⟦yes<end>⟧\n" in out
    assert "rejected:\n\nu:aaa;a:⟦no<end>⟧\n" in out
    assert cli.main([*arguments, "--reward-model", "--data.template_kwargs.x", "1"]) == 1
    assert (
        "template_kwargs.x = 1: the model's chat template does not read" in capsys.readouterr().err
    )


def test_generate_renders_as_the_run_did(tmp_path: Path, capsys):
    tree = {
        "model": {"path": "m"},
        "data": {"path": "d", "system_prompt": "Be kind.", "template_kwargs": {"think": False}},
        "reward": {"path": ["exact_match"]},
    }
    trained = toml_file.validate(Config, tree)
    (tmp_path / "config.toml").write_text(toml_file.dumps(trained))
    assert toml_file.load(Config, file=tmp_path / "config.toml") == trained

    def prompt(**given):
        made = {"model": {"path": str(tmp_path / "model")}, "prompt": given}
        return as_trained(toml_file.validate(GenerateConfig, made)).prompt

    assert prompt().template_kwargs == {"think": False}
    assert "system_prompt = 'Be kind.', template_kwargs = " in capsys.readouterr().err
    own = prompt(template_kwargs={}, system_prompt="Be brief.")
    assert (own.template_kwargs, own.system_prompt) == ({}, "Be brief.")


@pytest.mark.parametrize("value", ["3", "[1]", '"x"'])
def test_template_kwargs_are_a_table(value):
    given = [("data.template_kwargs", value)]
    with pytest.raises(toml_file.ConfigError, match=r"data\.template_kwargs = .*a table of keys"):
        toml_file.load(Config, overrides=given)
