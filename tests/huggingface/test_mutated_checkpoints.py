"""No mutation of a checkpoint ends a command with a traceback, or is read silently as another.

More examples, drawn at random:

    JAXRL_MUTATIONS=2500 pytest tests/huggingface/test_mutated_checkpoints.py
"""

import contextlib
import dataclasses
import io
import os
from types import SimpleNamespace

import jax
import pytest
from hypothesis import HealthCheck, event, given, note, settings, strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxrl import cli, huggingface
from jaxrl.core.precision import PRESETS
from jaxrl.huggingface import peft
from jaxrl.huggingface.files import write_tensors
from jaxrl.models import lora, spec
from jaxrl.models.parameters import param_specs
from jaxrl.models.rope import Llama3Scaling, Rope
from tests import tiny
from tests.huggingface.mutations import mutated, mutations

COUNT = os.environ.get("JAXRL_MUTATIONS")
more = settings(
    max_examples=int(COUNT or 60),
    derandomize=COUNT is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

FP32 = PRESETS["fp32"].params
SPECS = param_specs(tiny.CONFIG)
ADAPTED = lora.Adapted(lora.adapter_specs(SPECS, rank=3, targets=["*_proj"]), SPECS, alpha=6.0)
LLAMA = dataclasses.replace(
    tiny.CONFIG,
    model_type="llama",
    qk_norm=None,
    tied=False,
    rope=Rope(
        scaling=Llama3Scaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
        )
    ),
)
QWEN2 = dataclasses.replace(
    tiny.CONFIG, model_type="qwen2", qk_norm=None, qkv_bias=True, windows=(None, 5)
)


def write_tokenizer(directory, model):
    """Replaces the tokenizer by one with every kind of part."""
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex("\\s+"), " "), normalizers.Prepend("▁")]
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d|[^\d]+"), "isolated"), pre_tokenizers.Metaspace()]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<pad> $A", pair="<pad> $A $B", special_tokens=[("<pad>", 0)]
    )
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    made.add_special_tokens(["<pad>", "<end>"])
    made.save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Checkpoints of several families, one of them sharded, and adapters."""
    root = tmp_path_factory.mktemp("sources")
    for name, config in (("llama", LLAMA), ("qwen2", QWEN2), ("moe", tiny.MOE)):
        tiny.write_checkpoint(root / name, config=config)
        (root / name / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    pieces = ["<pad>", "<end>", "<unk>", *"▁0123456789+=abc", "ab", "abc"]
    numbers = {piece: i for i, piece in enumerate(pieces)}
    merges = [("a", "b"), ("ab", "c")]
    write_tokenizer(root / "llama", models.BPE(numbers, merges, unk_token="<unk>"))
    scores = [(piece, -float(i)) for i, piece in enumerate(pieces)]
    write_tokenizer(root / "moe", models.Unigram(scores, unk_id=2))
    params = tiny.params(config=QWEN2)
    huggingface.save(root / "qwen2", params, QWEN2, dtype=FP32, max_shard_bytes=20_000)
    adapters = spec.init(ADAPTED.adapters, jax.random.key(0), dtype=FP32)
    peft.save_adapter(root / "adapters", adapters, specs=ADAPTED, base="base", dtype=FP32)
    return {path.name: path for path in sorted(root.iterdir())}


@pytest.fixture
def command(monkeypatch):
    """Runs a command line; returns its status and output. Nothing is sampled."""

    def sample(*args, **kwargs):
        del args, kwargs
        return SimpleNamespace(sample=lambda *args, **kwargs: [])

    monkeypatch.setattr("jaxrl.builders.sampler.EmbeddedSampler", sample)
    monkeypatch.setattr(cli, "use_compile_cache", lambda: None)

    def run(*argv):
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            status = cli.main(list(map(str, argv)))
        return status, errors.getvalue()

    return run


def check(outcome, directory, *, command):
    """A command succeeds, or ends with one message that names the checkpoint."""
    status, errors = outcome
    note(errors)
    event(f"{command}: {'read' if status == 0 else 'refused'}")
    assert status in (0, 1)
    if status:
        lines = [line for line in errors.splitlines() if line.startswith("jaxrl ")]
        assert len(lines) == 1
        assert str(directory) in lines[0] or "chat template" in lines[0]


@more
@given(data=st.data())
def test_mutated_checkpoint_is_read_or_named(data, sources, command, tmp_path):
    source = sources[data.draw(st.sampled_from(["llama", "qwen2", "moe"]))]
    file = data.draw(st.sampled_from(sorted(source.iterdir())))
    directory = mutated(source, data.draw(mutations(file)), tmp_path / "mutated")
    check(command("generate", "--model.path", directory, "1+1"), directory, command="generate")
    if file.name == "config.json":
        outcome = command("plan", "--estimate", "--model.path", directory)
        check(outcome, directory, command="plan")


@more
@given(data=st.data())
def test_mutated_adapter_is_read_or_named(data, sources, command, tmp_path, monkeypatch):
    source = sources["adapters"]
    file = data.draw(st.sampled_from(sorted(source.iterdir())))
    directory = mutated(source, data.draw(mutations(file)), tmp_path / "mutated")
    train = SimpleNamespace(
        main=lambda _: bool(peft.load_adapter(directory, ADAPTED, dtype=FP32)) - 1
    )
    monkeypatch.setattr(cli, "load_command", lambda name: train)
    check(command("train"), directory, command="train")


def test_tensors_that_cannot_be_written_are_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError, match=r"a/b\.safetensors cannot be written: .*No such file"):
        write_tensors(tmp_path / "a" / "b.safetensors", {})
