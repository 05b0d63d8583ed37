"""Mutated configs, data files and chat templates: one message that names the cause, no traceback.

Each property tries 60 inputs, always the same ones. JAXRL_MUTATIONS=1000 tries more:

    JAXRL_MUTATIONS=1000 .venv-test/bin/python -m pytest -s tests/commands/test_mutated_inputs.py
"""

import contextlib
import functools
import io
import json
import os
import tomllib
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tomli_w
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from jaxrl.builders.optimizer import make_optimizer
from jaxrl.cli import main
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.huggingface import checkpoint
from jaxrl.huggingface.checkpoint import Checkpoint
from tests import tiny

COUNT = int(os.environ.get("JAXRL_MUTATIONS", "60"))
mutations = settings(
    max_examples=COUNT,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
KEYS = [name for name in toml_file.keys(Config) if not name.startswith(("run_dir", "hosts."))]
ROWS = [{"prompt": f"{a}+{a}=?", "answer": str(2 * a), "completion": str(2 * a)} for a in range(4)]
PAIRS = [{"prompt": "2+2=?", "chosen": "4", "rejected": "5", "margin": 1}]

NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2, 2**31, 2**63 - 1, 2**63, -(2**63), 10**400, 10**4299]),
    st.sampled_from([0.0, -0.5, 0.5, 1e-320, 1e-40, 1e308, -1e308, float("inf"), float("nan")]),
    st.integers(),
    st.floats(),
)
TEXTS = st.one_of(
    st.sampled_from(["", " ", "\n", "none", "auto", "a:b", ".py:f", "a:", "..", "x" * 5000, "\0"]),
    st.sampled_from(["http://", "http://[", "fp32,wire=", "=", "embed=", "{prompt}", "\u202e"]),
    st.text(max_size=8),
)
SCALARS = st.one_of(NUMBERS, TEXTS, st.booleans())
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(st.text(max_size=3), SCALARS, max_size=2),
    st.dates(),
)
JSON = st.recursive(
    st.one_of(st.none(), SCALARS, st.sampled_from(["\ud800", "x\udfff"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["role", "content", "prompt", "x"]), inner, max_size=3),
    ),
    max_leaves=6,
)
TEMPLATES = st.lists(
    st.sampled_from(
        [
            "{{ messages[0].content }}",
            "{{ messages[9].content }}",
            "{{ 1 / 0 }}",
            "{{ 10 ** 5000 }}",
            "{{ raise_exception('no') }}",
            "{{ undefined.a.b }}",
            "{{ messages[0]['content'] + 1 }}",
            "{% for m in messages %}{{ m.role }}",
            "{% endfor %}",
            "{% for i in range(10 ** 9) %}{% endfor %}",
            "{{ messages | tojson }}",
            "{{ ''.__class__.__mro__ }}",
            r"{{ '\ud800' }}",
            r"{{ messages[0].content + '\udfff' }}",
            "{%",
            "}}",
            "x",
        ]
    ),
    max_size=3,
).map("".join)


class StartedError(Exception):
    """A command has read all of its inputs and would build the model now."""


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("mutated")
    tiny.write_checkpoint(directory / "model")
    for name, rows in (("rows", ROWS), ("pairs", PAIRS)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(lines)
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), directory / f"{name}.parquet", compression="none"
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setattr(checkpoint, "load_tokenizer", functools.cache(checkpoint.load_tokenizer))
        for module in ("run.open_learning", "supervised.sft.set_up", "supervised.dpo.set_up"):
            patch.setattr(f"jaxrl.training.{module}", _started)
        patch.setattr("jaxrl.training.supervised.reward_model.set_up", _started)
        yield directory


def _started(config, *_, **__):
    if isinstance(config, Config):
        specs = {"w": None}
        make_optimizer(config.optimizer, total_steps=config.optimizer_steps, specs=specs)
    raise StartedError


def attempt(*argv: str) -> tuple[str, str]:
    """How the command ended (`accepted`, `started` or `refused`), and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(argv)
    except StartedError:
        return "started", ""
    except SystemExit as end:
        status = end.code
    if status == 0:
        return "accepted", out.getvalue()
    text = err.getvalue()
    assert status in (1, 2)
    assert text.startswith(("jaxrl", "usage: jaxrl"))
    assert len(text) < 20000
    return "refused", text


def base(material: Path) -> dict:
    return {
        "run_dir": "run",
        "precision": "fp32",
        "model": {"path": "model"},
        "data": {"path": "rows.jsonl", "max_prompt_tokens": 64},
        "reward": {"path": ["exact_match"]},
        "sampling": {"max_tokens": 8},
        "train": {"train_batch": 2, "group_size": 2, "microbatch_tokens": 128},
    }


def check_config(path: str, *options: str) -> str:
    """Whatever `jaxrl config` accepts `jaxrl train` starts with; else a message names the cause."""
    ended, text = attempt("config", path, *options)
    if ended == "accepted":
        toml_file.validate(Config, tomllib.loads(text))
        ended, text = attempt("train", path, *options)
        # What only files and devices tell.
        known = ("data.", "the model ", ".jsonl", ".parquet", "data '", "devices", "products")
        known += ("bytes names at most",)  # of the model's vocabulary
        assert ended == "started" or any(word in text for word in known), text
        return ended
    tables = {name.rpartition(".")[0] for name in KEYS} - {""}
    named = [path, "there is no such key", *options]
    named += [*(f"{name} " for name in toml_file.keys(Config)), *(f"{t}." for t in tables)]
    named += [f"[{table}]" for table in tables]
    for line in text.splitlines():
        assert any(name in line for name in named) or line.startswith("usage"), text
    return ended


seen: Counter = Counter()


@pytest.fixture(scope="module", autouse=True)
def counts():
    yield
    print(f"\n{sum(seen.values())} inputs: {dict(seen)}")


@mutations
@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=2))
def test_values_of_a_config(material, changes):
    tree = base(material)
    for name, value in changes:
        section, _, key = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[key] = value
    Path("t.toml").write_text(tomli_w.dumps(tree), encoding="utf-8")
    seen["config values: " + check_config("t.toml")] += 1


@mutations
@given(st.sampled_from(KEYS), st.one_of(TEXTS, NUMBERS.map(str), st.just("9" * 5000)))
def test_values_on_the_command_line(material, name, text):
    Path("t.toml").write_text(tomli_w.dumps(base(material)), encoding="utf-8")
    seen["options: " + check_config("t.toml", f"--{name}={text}")] += 1


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    place = st.integers(0, len(content))
    part = st.tuples(place, st.integers(0, 8), st.binary(max_size=4))
    return st.one_of(
        st.sampled_from([b"", b"\xff\xfe", content.decode(errors="replace").encode("utf-16")]),
        place.map(lambda n: content[:n]),
        part.map(lambda p: content[: p[0]] + p[2] + content[p[0] + p[1] :]),
    )


@mutations
@given(st.data())
def test_bytes_of_a_config(material, data):
    content = tomli_w.dumps(base(material)).encode()
    Path("b.toml").write_bytes(data.draw(damaged(content)))
    seen["config bytes: " + check_config("b.toml")] += 1


COMMANDS = {
    "train": ("rows", ["--reward.path=exact_match", "--sampling.max_tokens=8"]),
    "sft": ("rows", ["--train.row_length=64"]),
    "dpo": ("pairs", ["--train.row_length=64"]),
    "reward-model": ("pairs", ["--train.row_length=64", "--data.margin_key=margin"]),
}


def check_data(command: str, path: str, *more: str) -> str:
    options = [*COMMANDS[command][1], "--model.path=model", "--run_dir=run", *more]
    ended, text = attempt(command, f"--data.path={path}", *options)
    assert ended == "started" or path in text, text
    return ended


@mutations
@given(st.sampled_from([*COMMANDS]), st.data())
def test_values_of_data(material, command, data):
    name, _ = COMMANDS[command]
    row = dict((ROWS if name == "rows" else PAIRS)[0])
    row[data.draw(st.sampled_from([*row]))] = data.draw(JSON)
    Path("d.jsonl").write_text(json.dumps(row) + "\n")
    seen["data values: " + check_data(command, "d.jsonl")] += 1


@mutations
@given(st.sampled_from([*COMMANDS]), st.sampled_from(["jsonl", "parquet"]), st.data())
def test_bytes_of_data(material, command, suffix, data):
    name, _ = COMMANDS[command]
    content = Path(f"{name}.{suffix}").read_bytes()
    Path(f"d.{suffix}").write_bytes(data.draw(damaged(content)))
    seen[f"{suffix} bytes: " + check_data(command, f"d.{suffix}")] += 1


@mutations
@given(st.one_of(TEMPLATES, st.sampled_from([3, ["x"], {"default": "x"}, {}])))
def test_chat_templates(material, template):
    tokenizer = Checkpoint("model").tokenizer
    kept, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        ended, text = attempt(
            "train", *COMMANDS["train"][1], "--model.path=model", "--data.path=rows.jsonl"
        )
    finally:
        tokenizer.chat_template = kept
    assert ended == "started" or "rows.jsonl:" in text, text
    seen["templates: " + ended] += 1
