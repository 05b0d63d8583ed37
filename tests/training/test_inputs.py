"""A run resumes on the inputs that it began with, or not at all."""

import json
import os
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
import xxhash
from safetensors.numpy import load_file, save_file

from jaxrl.core.batch import given_rollout
from jaxrl.data.prompts import Example
from jaxrl.training import inputs
from jaxrl.training.run_directory import ResumeError
from tests.training.small_runs import run, supervised, write_material

KINDS = {
    "full": (run, {}),
    "reference": (run, {"reward.kl": "0.1"}),
    "adapters": (run, {"lora.rank": "2"}),
    "teacher": (run, {"reward.model": "{}/teacher"}),
    "sft": (supervised, {}),
    "sft adapters": (supervised, {"lora.rank": "2"}),
    "dpo": (supervised, {"loss.name": "sigmoid", "data.eval_path": "{}/pairs.jsonl"}),
}


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return write_material(tmp_path_factory.mktemp("material"))


def keys_of(kind, material):
    train, keys = KINDS[kind]
    return train, {key: value.format(material) for key, value in keys.items()}


@pytest.fixture(scope="module")
def begun(material, tmp_path_factory):
    """Runs of two steps by kind, made when they are first asked for."""
    made = {}

    def find(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("begun") / "run"
            train, keys = keys_of(kind, material)
            train(material, made[kind], **keys)
        return made[kind]

    return find


@contextmanager
def edited(path, change):
    """The file, changed inside the block."""
    before = path.read_bytes()
    path.write_bytes(change(before))
    try:
        yield
    finally:
        path.write_bytes(before)


def resume(material, begun, kind, tmp_path):
    shutil.copytree(begun(kind), tmp_path / "run")
    train, keys = keys_of(kind, material)
    return train(material, tmp_path / "run", **keys | {"train.steps": "3"})


def more_rows(content):
    lines = content.splitlines(keepends=True)
    return b"".join([*lines[3:8], *lines])


def appended(content):
    return content + content.splitlines(keepends=True)[0]


def other_weights(content):
    return content[:-1] + bytes([content[-1] ^ 1])


def other_answer(content):
    return content.replace(b'"answer": "7"', b'"answer": "8"')


def other_template(content):
    return content.replace(b"{{ m.content }}", b"{{ m.content | upper }}")


def other_token(content):
    return content.replace(b'"q"', b'"Q"')


REFUSED = [
    ("full", "prompts.jsonl", more_rows, "training data (data.path"),
    ("full", "prompts.jsonl", appended, "training data (data.path"),
    ("full", "prompts.jsonl", other_answer, "training data (data.path"),
    ("full", "held_out.jsonl", more_rows, "held-out data (data.eval_path"),
    ("full", "model/tokenizer_config.json", other_template, "model': chat template)"),
    ("full", "model/tokenizer.json", other_token, "model': vocabulary)"),
    ("adapters", "model/model.safetensors", other_weights, "base weights (model.path"),
    ("reference", "model/model.safetensors", other_weights, "reference weights (model.path"),
    ("teacher", "teacher/model.safetensors", other_weights, "teacher (reward.model"),
    ("sft", "texts.jsonl", more_rows, "training data (data.path"),
    ("sft adapters", "model/model.safetensors", other_weights, "base weights (model.path"),
    ("dpo", "pairs.jsonl", appended, "training data (data.path"),
    ("dpo", "model/model.safetensors", other_weights, "reference weights (model.path"),
]


@pytest.mark.parametrize(("kind", "name", "change", "expected"), REFUSED)
def test_changed_input_is_refused(material, begun, tmp_path, kind, name, change, expected):
    begun(kind)
    with edited(material / name, change), pytest.raises(ResumeError) as error:
        resume(material, begun, kind, tmp_path)
    assert expected in str(error.value)
    assert f"--fork {tmp_path / 'run'}" in str(error.value)
    assert (".safetensors" in str(error.value)) == name.endswith(".safetensors")


@pytest.mark.parametrize("kind", ["full", "sft"])
def test_same_inputs_resume(material, begun, tmp_path, kind):
    """Put back, or weights that no step reads again."""
    begun(kind)
    with edited(material / "model" / "model.safetensors", other_weights):
        assert resume(material, begun, kind, tmp_path).step == 3


def test_run_without_digests_resumes_and_gets_them(material, begun, tmp_path):
    shutil.copytree(begun("full"), tmp_path / "old")
    (tmp_path / "old" / "inputs.json").unlink()
    with edited(material / "prompts.jsonl", more_rows):
        assert resume(material, lambda kind: tmp_path / "old", "full", tmp_path).step == 3
    with pytest.raises(ResumeError, match="training data"):
        run(material, tmp_path / "run", **{"train.steps": "4"})


def test_damaged_digests_name_the_file(material, begun, tmp_path):
    shutil.copytree(begun("full"), tmp_path / "old")
    (tmp_path / "old" / "inputs.json").write_text("{")
    with pytest.raises(ResumeError, match=r"inputs\.json does not hold the inputs of a run"):
        resume(material, lambda kind: tmp_path / "old", "full", tmp_path)


@pytest.mark.parametrize("kind", ["full", "dpo"])
def test_other_held_out_file_is_no_change(material, begun, tmp_path, kind, capsys):
    """Held-out keys are free, so another file under another key resumes. What was measured on the
    old one is not compared with what is measured on it."""
    shutil.copytree(begun(kind), tmp_path / "run")
    rows = (material / ("pairs.jsonl" if kind == "dpo" else "prompts.jsonl")).read_text()
    (tmp_path / "other.jsonl").write_text("".join(rows.splitlines(keepends=True)[:5]))
    train, keys = keys_of(kind, material)
    keys |= {"data.eval_path": tmp_path / "other.jsonl"}
    told = "other held-out data than at the last checkpoint: the accuracies before, and the best"
    # The first start has no step left and saves nothing.
    for steps, times in ((2, 1), (3, 1), (3, 0)):
        found = train(material, tmp_path / "run", **keys | {"train.steps": steps})
        assert capsys.readouterr().err.count(told) == times
        assert found.step == steps
        assert found.first == {} if kind == "dpo" else found.initial_accuracy is None
    assert found.last["eval/accuracy"] if kind == "dpo" else found.final_accuracy is not None


def test_unchanged_weights_are_not_read_again(tmp_path, monkeypatch):
    file = tmp_path / "model.safetensors"
    save_file({"w": np.arange(4.0)}, file)
    given = inputs.directory_input("base weights", "model.path", str(tmp_path))
    found = inputs.compare_inputs(tmp_path, [given])
    assert found["base weights"].digests == {
        "model.safetensors": xxhash.xxh3_128_hexdigest(file.read_bytes())
    }
    inputs.write_inputs(tmp_path, found)
    read = []
    real = inputs.file_digest
    monkeypatch.setattr(inputs, "file_digest", lambda path: read.append(path) or real(path))
    assert inputs.compare_inputs(tmp_path, [given]) == found
    assert read == []
    os.utime(file, ns=(1, 1))
    assert inputs.compare_inputs(tmp_path, [given])["base weights"].digests == (
        found["base weights"].digests
    )
    assert read == [file]
    assert load_file(file)["w"].tolist() == [0, 1, 2, 3]


def test_digests_see_every_part_in_order():
    one, other = given_rollout([1, 2], [3]), given_rollout([1], [2, 3])
    row = {"prompt": "a", "answer": np.int64(3), "image": object()}
    found = [
        [one],
        [other],
        [one, other],
        [other, one],
        [one._replace(action_mask=np.zeros(1, bool))],
        [Example(one.prompt, row, row)],
        [Example(one.prompt, row | {"answer": 4}, row)],
    ]
    digests = [inputs.rows_digest(rows) for rows in found]
    assert len(set(digests)) == len(digests)
    again = row | {"image": object()}  # at another address
    assert inputs.rows_digest([Example(one.prompt, again, row)]) == digests[5]
    assert json.loads(inputs._json(row))["answer"] == 3
