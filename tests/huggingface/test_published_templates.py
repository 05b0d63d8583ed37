"""Published tokenizers and templates against transformers' own rendering: every cell of the table
in docs/text.md, and the ids that jaxrl makes of prompts and of supervised rows."""

import copy
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig
from transformers.utils import logging as transformers_logging

from jaxrl import huggingface
from jaxrl.builders.prompts import sampling_params
from jaxrl.config.sampler import SamplingConfig
from jaxrl.config.supervised import SFTConfig
from jaxrl.config.toml_file import load
from jaxrl.core.precision import PRESETS
from jaxrl.data.ends import end_note, turn_end
from jaxrl.data.pairs import PairColumns, read_pairs
from jaxrl.data.prompts import Rendering, load_prompts, start_tokens
from jaxrl.data.rows import read_rows
from jaxrl.huggingface.tokenizer import load_tokenizer
from jaxrl.training.supervised import sft
from tests import published

PAGE = Path(__file__).parents[2] / "docs" / "text.md"
FAMILIES = {
    "Qwen2.5": "qwen2_5",
    "Qwen3": "qwen3",
    "Gemma 3": "gemma3",
    "Llama 3": "llama3",
    "Llama 3.1": "llama3_1",
    "DeepSeek V3": "deepseek_v3",
    "Mistral Nemo": "mistral_nemo",
}
TALK = [
    {"role": "user", "content": "Water boils at?"},
    {"role": "assistant", "content": "At 100 °C, in Oslo."},
    {"role": "user", "content": "And in La Paz?"},
    {"role": "assistant", "content": "At about 87 °C."},
]


def table() -> dict[str, dict[str, str]]:
    """{family: {column: cell}} of the page's table."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [
        [cell.strip(" `").replace("\\|", "|") for cell in line.replace("\\|", "\\\0").split("|")]
        for line in lines
    ]
    rows = [[cell.replace("\\\0", "|") for cell in row[1:-1]] for row in cells]
    return {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}


def ids(tokenizer: Any, messages: list[dict[str, str]], *, prompt: bool) -> list[int]:
    """The ids of transformers' own rendering."""
    return tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False, add_generation_prompt=prompt
    )


def write(path: Path, row: dict[str, Any]) -> Path:
    path.write_text(json.dumps(row) + "\n")
    return path


def rows_of(tokenizer: Any, path: Path, **keys: str) -> list[tuple[list[int], list[int]]]:
    """The (prompt, completion) ids of `jaxrl sft`."""
    overrides = {"model.path": "-", "data.path": str(path), "run_dir": "-"}
    config = load(SFTConfig, overrides=[*overrides.items(), *keys.items()])
    texts = sft.load_texts(config.data, tokenizer, max_tokens=500)
    return [(list(map(int, s.prompt)), list(map(int, s.completion))) for s in texts.sequences]


def prompt_of(tokenizer: Any, path: Path, rendering: Rendering) -> list[int]:
    """The ids of the prompt of `jaxrl train`."""
    found = load_prompts(
        read_rows(str(path)),
        tokenizer,
        prompt_key="prompt",
        answer_key=None,
        rendering=rendering,
        max_tokens=500,
    )
    return found.examples[0].tokens.tolist()


def test_the_page_has_every_family():
    assert list(table()) == list(FAMILIES)


@pytest.mark.parametrize(("family", "name"), FAMILIES.items())
def test_the_table_says_what_the_templates_write(family, name):
    tokenizer, cells = published.tokenizer(name), table()[family]
    assert tokenizer.decode(start_tokens(tokenizer)) == cells["before a text without template"]
    first = ids(tokenizer, TALK[:1], prompt=True)[0]
    bos = "" if first != tokenizer.bos_token_id else tokenizer.bos_token
    assert bos == cells["before the first message"]
    end = turn_end(tokenizer)
    assert end is not None
    assert tokenizer.decode([end.token]) == cells["end of a turn"]
    whole = ids(tokenizer, TALK, prompt=False)
    words = tokenizer.encode(TALK[-1]["content"], add_special_tokens=False)
    places = range(len(whole) - len(words))
    place = next(i for i in places if whole[i : i + len(words)] == words)
    assert whole[place + len(words)] == end.token


@pytest.mark.parametrize("name", FAMILIES.values())
def test_prompts_and_rows_have_the_ids_of_transformers(name, tmp_path):
    tokenizer = published.tokenizer(name)
    path = write(tmp_path / "a.jsonl", {"prompt": TALK[:3], "completion": TALK[3:]})
    prompt = ids(tokenizer, TALK[:3], prompt=True)
    assert prompt_of(tokenizer, path, Rendering()) == prompt
    whole, (row,) = ids(tokenizer, TALK, prompt=False), rows_of(tokenizer, path)
    last = len(whole) - whole[::-1].index(row[1][-1])
    assert row[0] == prompt
    assert row[0] + row[1] == whole[:last]
    pairs = read_pairs(
        iter([*read_rows(str(write(tmp_path / "b.jsonl", {"c": TALK, "r": TALK})))]),
        tokenizer,
        columns=PairColumns(None, "c", "r"),
        rendering=Rendering(),
        max_tokens=500,
    )
    for one in (pairs.pairs[0].chosen, pairs.pairs[0].rejected):
        assert (one.prompt.tolist(), one.completion.tolist()) == row


@pytest.mark.parametrize("name", FAMILIES.values())
def test_texts_without_a_template_begin_as_the_tokenizer_begins_them(name, tmp_path):
    tokenizer, text = published.tokenizer(name), "Water boils at"
    own, eos = tokenizer.encode(text), tokenizer.eos_token_id
    path = write(tmp_path / "a.jsonl", {"prompt": text, "completion": " 100 °C", "t": text})
    plain = Rendering(template="text")
    assert prompt_of(tokenizer, path, plain) == own
    after = tokenizer.encode(" 100 °C", add_special_tokens=False)
    assert rows_of(tokenizer, path, **{"data.template": "text"}) == [(own, [*after, eos])]
    assert rows_of(tokenizer, path, **{"data.text_key": "t"}) == [(own[:1], [*own[1:], eos])]
    # Neither the first tokens nor the end are written twice.
    given = tokenizer.decode(own) + tokenizer.eos_token
    path = write(tmp_path / "a.jsonl", {"prompt": given, "t": given})
    assert prompt_of(tokenizer, path, plain) == [*own, eos]
    assert rows_of(tokenizer, path, **{"data.text_key": "t"}) == [(own[:1], [*own[1:], eos])]


@pytest.mark.parametrize(
    ("name", "eos"),
    [("qwen3", "<|endoftext|>"), ("gemma3", "<eos>"), ("llama3", "<|end_of_text|>")],
)
def test_the_end_of_a_turn_is_the_templates_not_the_tokenizers(name, eos, tmp_path):
    tokenizer = copy.deepcopy(published.tokenizer(name))
    tokenizer.eos_token = eos
    path = write(tmp_path / "a.jsonl", {"prompt": "Hi", "completion": "Hello."})
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    whole, end = ids(tokenizer, messages, prompt=False), turn_end(tokenizer)
    assert end is not None
    assert rows_of(tokenizer, path)[0][1][-1] == end.token != tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in whole
    note = end_note(tokenizer, Rendering())
    assert note is not None
    assert end.text in note
    assert eos in note
    assert end_note(tokenizer, Rendering(template="text")) is None


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> huggingface.Checkpoint:
    return huggingface.Checkpoint(published.checkpoint("llama3", tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize("name", ["llama3", "deepseek_v3"])
def test_published_files_are_read_without_advice(name, monkeypatch):
    told = list[str]()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: told.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    transformers_logging.warning_once.cache_clear()
    load_tokenizer(published.directory(name), vocab_size=200_000)
    assert told == []


def test_sampling_stops_at_the_end_of_a_turn(llama):
    end, eos = llama.tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|end_of_text|>"])
    assert set(sampling_params(SamplingConfig(), llama, seed=0).stop) == {(end,), (eos,)}


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (None, {"eos_token_id": [128001, 128009]}),
        ({"top_p": 0.9}, {"top_p": 0.9, "eos_token_id": [128001, 128009]}),
        ({"eos_token_id": 128008}, {"eos_token_id": [128008, 128001, 128009]}),
        ({"eos_token_id": [128009, 128001]}, {"eos_token_id": [128009, 128001]}),
    ],
)
def test_an_exported_model_stops_at_the_end_of_a_turn(llama, tmp_path, given, written):
    source = shutil.copytree(llama.directory, tmp_path / "source")
    if given is not None:
        write(source / "generation_config.json", given)
    config, params = huggingface.load(source, dtype=None)
    wire = PRESETS["fp32"].wire
    out = tmp_path / "out"
    huggingface.save(out, params, config, dtype=wire, source=huggingface.Checkpoint(source))
    assert json.loads((out / "generation_config.json").read_text()) == written
    ends = GenerationConfig.from_pretrained(out).eos_token_id
    assert sorted(ends) == list(huggingface.Checkpoint(out).end_ids)
