"""Models by name, from a stand-in of the Hugging Face hub on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl.huggingface import hub
from tests import arithmetic
from tests.documented import snippets
from tests.huggingface import stand_in
from tests.huggingface.stand_in import COMMITS

CODE = "import sys; from jaxrl.huggingface.hub import local_directory as f; print(f(sys.argv[1]))"
# Mistral publishes all weights a second time, as a file of its own.
NOT_WANTED = {"pytorch_model.bin", "consolidated.safetensors"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hub") / "model"
    arithmetic.script.write_model(directory, arithmetic.TINY, seed=0)
    for name in NOT_WANTED:
        (directory / name).write_bytes(b"not wanted")
    return directory


@pytest.fixture
def server(model):
    with stand_in.serving(model) as url:
        yield url


def ask(*arguments, url, home):
    environment = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_ETAG_TIMEOUT": "60"}
    command = [sys.executable, "-c", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_model_is_downloaded_once(server, model, tmp_path):
    for name, commit in (("lab/tiny", COMMITS["main"]), ("lab/tiny@v1", COMMITS["v1"])):
        found = ask(CODE, name, url=server, home=tmp_path)
        assert found.returncode == 0, found.stderr
        directory = found.stdout.strip()
        assert directory.endswith(commit)  # says which revision a run is from
        assert {*os.listdir(directory)} == {*os.listdir(model)} - NOT_WANTED
        for file in os.listdir(directory):
            assert Path(directory, file).read_bytes() == (model / file).read_bytes()
    again = ask(CODE, "lab/tiny", url="http://127.0.0.1:9", home=tmp_path)
    assert again.stdout.strip().endswith(COMMITS["main"])


@pytest.mark.parametrize("name", ["lab/other", "lab/tiny@v9"])
def test_missing_on_the_hub_is_named(name, server, tmp_path):
    found = ask(CODE, name, url=server, home=tmp_path)
    assert found.returncode == 1
    assert f"ValueError: {name!r} is not a directory, and loading it from" in found.stderr


@pytest.mark.parametrize("path", ["m", "runs/sft/model", "/models/m", "./m", "a b/c"])
def test_paths_are_no_names(path):
    assert hub.local_directory(path) == path


def test_a_directory_comes_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab" / "tiny").mkdir(parents=True)
    assert hub.local_directory("lab/tiny") == "lab/tiny"


def test_the_readmes_program_runs_from_a_name(server, tmp_path):
    (program,) = (
        s.text
        for s in snippets("python")
        if "jaxrl.make_learner(" in s.text and "README" in s.where
    )
    program = program.replace("runs/quickstart/sft/model", "lab/tiny")
    shown = "print(jaxrl.to_floats(metrics)['loss'], sampler.version)"
    found = ask(f"{program}\n{shown}", url=server, home=tmp_path)
    assert found.stdout.split()[-1:] == ["3"], found.stderr
