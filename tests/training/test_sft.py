import json
import random
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import huggingface
from jaxrl.config.supervised import SFTConfig
from jaxrl.config.toml_file import ConfigError, load
from jaxrl.core.batch import Minibatch
from jaxrl.core.hosts import Hosts
from jaxrl.core.packing import pack
from jaxrl.core.precision import PRESETS
from jaxrl.learner.optimizers import make_optimizer, make_schedule
from jaxrl.learner.policy import make_learner
from jaxrl.losses.aggregation import token_mean
from jaxrl.losses.objectives import objective
from jaxrl.models.model import decoder
from jaxrl.tracking.tracker import read_metrics
from jaxrl.training.run_directory import ResumeError, lock
from jaxrl.training.supervised import fit, sft
from tests import arithmetic


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    directory = tmp_path_factory.mktemp("arithmetic")
    arithmetic.write(directory)
    return directory


def config(material, run_dir, **overrides):
    keys = {
        "model.path": f"{material}/untrained",
        "data.path": f"{material}/sft.jsonl",
        "run_dir": str(run_dir),
        "precision": "fp32",
        "train.steps": "20",
        "train.batch_size": "8",
        "train.row_length": "96",
        "train.microbatch_tokens": "192",
        "optimizer.learning_rate": "0.01",
    }
    return load(SFTConfig, overrides=list((keys | overrides).items()))


def test_student_data_drops_carries_only():
    rng = random.Random(3)
    assert arithmetic.script.student(123, 456, rng=rng) == "3+6=9 2+5=7 1+4=5 579"
    written = {arithmetic.script.student(347, 585, rng=rng) for _ in range(200)}
    assert written == {
        "7+5=12 4+8+1=13 3+5+1=9 932",
        "7+5=12 4+8=12 3+5+1=9 922",
        "7+5=12 4+8+1=13 3+5=8 832",
        "7+5=12 4+8=12 3+5=8 822",
    }


def test_training_and_held_out_sums_are_disjoint(material):
    seen = [
        json.loads(line)["prompt"]
        for name in ("sft", "train", "held_out")
        for line in (material / f"{name}.jsonl").read_text().splitlines()
    ]
    assert len(seen) == len(set(seen)) == 88


def test_texts_tokenize_to_prompt_completion_and_end(material):
    tokenizer = huggingface.Checkpoint(material / "untrained").tokenizer
    texts = sft.load_texts(config(material, "x").data, tokenizer, max_tokens=96)
    row = json.loads((material / "sft.jsonl").read_text().splitlines()[0])
    first = texts.sequences[0]
    assert tokenizer.decode(first.prompt) == f"<|user|>{row['prompt']}<|assistant|>"
    assert tokenizer.decode(first.completion) == row["completion"] + "<|end|>"
    short = sft.load_texts(config(material, "x").data, tokenizer, max_tokens=first.length)
    assert len(short.sequences) + short.too_long == 64
    with pytest.raises(ValueError, match="each of the 64 has more than 4 tokens"):
        sft.load_texts(config(material, "x").data, tokenizer, max_tokens=4)


def test_texts_train_from_the_second_token(material, tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "abc"}\n')
    tokenizer = huggingface.Checkpoint(material / "untrained").tokenizer
    keys = {"data.path": f"{tmp_path}/texts.jsonl", "data.text_key": "text"}
    (one,) = sft.load_texts(config(material, "x", **keys).data, tokenizer, max_tokens=9).sequences
    assert tokenizer.decode([*one.prompt, *one.completion]) == "abc<|end|>"
    assert len(one.prompt) == 1
    (tmp_path / "texts.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match=r"texts\.jsonl:1: no token to predict the text from"):
        sft.load_texts(config(material, "x", **keys).data, tokenizer, max_tokens=9)


def test_conversations_are_learnt_turn_by_turn(material, tmp_path):
    tokenizer = huggingface.Checkpoint(material / "untrained").tokenizer
    says = [("user", "1+1="), ("assistant", "2"), ("user", "2+2="), ("assistant", "4")]
    messages = [{"role": role, "content": text} for role, text in says]

    def load(row, **keys):
        (tmp_path / "chats.jsonl").write_text(json.dumps(row) + "\n")
        given = config(material, "x", **{"data.path": f"{tmp_path}/chats.jsonl"} | keys).data
        texts = sft.load_texts(given, tokenizer, max_tokens=96).sequences
        return [(tokenizer.decode(t.prompt), tokenizer.decode(t.completion)) for t in texts]

    whole = {"data.prompt_key": "none", "data.completion_key": "messages"}
    first = ("<|user|>1+1=<|assistant|>", "2<|end|>")
    assert load({"messages": messages}, **whole) == [
        first,
        ("<|user|>1+1=<|assistant|>2<|end|><|user|>2+2=<|assistant|>", "4<|end|>"),
    ]
    assert load({"prompt": messages[:1], "completion": messages[1:2]}) == [first]
    assert load({"prompt": "1+1=", "completion": "2"}) == [first]
    for row, keys, message in (
        ({"messages": messages[:1]}, whole, "has no message of the assistant after another"),
        ({"messages": "2"}, whole, "is a text; with data.prompt_key = 'none' write messages"),
        ({"prompt": "1+1=", "completion": messages}, {}, "has 4 messages, expected one of the"),
    ):
        with pytest.raises(ValueError, match=rf"chats\.jsonl:1: '\w+' {message}"):
            load(row, **keys)
    with pytest.raises(ValueError, match=r"no 'prompt'; .*'none' and data\.completion_key if"):
        load({"messages": messages})


def test_loss_is_completion_cross_entropy(material):
    """Against a plain softmax over unpacked sequences."""
    tokenizer = huggingface.Checkpoint(material / "untrained").tokenizer
    sequences = sft.load_texts(config(material, "x").data, tokenizer, max_tokens=96).sequences[:3]
    decoder_config, params = huggingface.load(material / "untrained", dtype=np.dtype(np.float32))
    model, precision = decoder(decoder_config), PRESETS["fp32"]
    total, count = 0.0, 0
    for one in sequences:
        tokens = jnp.asarray([*one.prompt, *one.completion])[None]
        where = jnp.arange(tokens.shape[1])[None]
        hidden = model.hidden(params, tokens, where, jnp.ones_like(tokens), precision=precision)
        logprobs = jax.nn.log_softmax(hidden[0] @ model.unembedding(params).T)
        learnt = range(len(one.prompt), one.length)
        total -= sum(float(logprobs[t - 1, tokens[0, t]]) for t in learnt)
        count += len(one.completion)

    learner = make_learner(
        model,
        objective(sft.cross_entropy(), token_mean),
        optimizer=make_optimizer(
            "sgd",
            make_schedule("constant", learning_rate=0.1, warmup_steps=0, total_steps=1),
            betas=(0.0, 0.0),
            eps=1e-8,
            weight_decay=0.0,
            clip_norm=None,
            specs=model.specs,
        ),
        precision=precision,
    )
    batch = pack(sequences, [0.0] * 3, rows=[[0, 2], [1]], row_length=96)
    minibatch = Minibatch(batch=batch, microbatches=jnp.int32(1), rows_per_microbatch=2)
    _, metrics = jax.jit(learner.step)(learner.init(params), minibatch)
    np.testing.assert_allclose(float(metrics["loss"].value), total / count, rtol=1e-5)


def test_finetuning_learns_and_saves_a_model(material, tmp_path):
    result = sft.finetune(config(material, tmp_path))
    losses = [e["loss"] for e in read_metrics(tmp_path / "metrics.jsonl")]
    assert losses[-1] < 3.0 < np.log(102)
    assert result.model is not None
    _, before = huggingface.load(material / "untrained", dtype=None)
    _, after = huggingface.load(result.model, dtype=None)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), before, after)
    assert all(jax.tree.leaves(changed))
    tokenizer = huggingface.Checkpoint(result.model).tokenizer
    assert tokenizer.decode([3]) == "<|user|>"


def test_a_run_that_skips_every_step_says_so(material, tmp_path, capsys):
    overflows = {"precision": "fp16_master,loss_scale=static:1e30", "train.steps": "21"}
    sft.finetune(config(material, tmp_path, **overflows))
    told = capsys.readouterr().err
    assert told.count("changed nothing") == 1
    assert "step 10: no gradient of the last 10 steps was finite" in told
    assert "(0 of 10 steps were applied)" in told


def test_dynamic_fine_tuning_by_config(material, tmp_path):
    """-p log p is at most 1 / e; cross-entropy begins above 3."""
    sft.finetune(config(material, tmp_path, **{"loss.name": "dft", "train.steps": "1"}))
    (loss,) = [e["loss"] for e in read_metrics(tmp_path / "metrics.jsonl")]
    assert 0 < loss < np.exp(-1)


def test_run_directory_is_locked(material, tmp_path):
    run_dir = tmp_path / "run"
    with lock(run_dir, Hosts()), pytest.raises(ResumeError, match="another program trains in"):
        sft.finetune(config(material, run_dir))


def test_signal_ends_the_run(material, tmp_path, monkeypatch, capsys):
    real = fit.next_batch

    def interrupted(*args, **kwargs):
        if kwargs["position"] == 16:
            signal.raise_signal(signal.SIGINT)
        return real(*args, **kwargs)

    monkeypatch.setattr(fit, "next_batch", interrupted)
    result = sft.finetune(config(material, tmp_path))
    assert (result.step, result.signum, result.model) == (3, signal.SIGINT, None)
    assert "devices: 1 x cpu, attention by xla" in capsys.readouterr().err


def test_contradictions():
    keys = [("model.path", "m"), ("data.path", "d"), ("train.row_length", "8192")]
    with pytest.raises(ConfigError, match=r"train\.microbatch_tokens = 4096 does not hold one row"):
        load(SFTConfig, overrides=keys)
    with pytest.raises(ConfigError, match="sums=fixed makes log-probs equal to those of"):
        load(SFTConfig, overrides=[*keys, ("precision", "fp32,sums=fixed")])
