"""Pairs of answers: what is read, what is refused, and the loop that learns from them."""

import json
import signal

import jax
import numpy as np
import optax
import pytest
from orbax.checkpoint import StandardCheckpointer

from jaxrl import huggingface
from jaxrl.builders.layout import make_layout
from jaxrl.builders.model import find_models, load_model
from jaxrl.builders.reward_model import load_scorer
from jaxrl.builders.supervised import supervised_shape
from jaxrl.cli import main
from jaxrl.config.mesh import MeshConfig
from jaxrl.config.preference import DPOConfig, RewardModelConfig
from jaxrl.config.toml_file import ConfigError, load
from jaxrl.config.training import Config
from jaxrl.core.metrics import to_floats
from jaxrl.core.precision import PRESETS
from jaxrl.data.rows import Row
from jaxrl.learner.reward_model import make_ranker
from jaxrl.losses import preference
from jaxrl.models.model import decoder
from jaxrl.models.scorer import sequence_scores
from jaxrl.tracking.tracker import read_metrics
from jaxrl.training.supervised import pairs
from jaxrl.training.supervised.dpo import load_loss
from jaxrl.training.supervised.pairs import load_pairs, pack_pairs, tokenize
from tests import tiny

PARTS_OF_LOSSES = {
    *("PairLoss", "ScoredCompletion", "ScoredPair", "bradley_terry", "pair_count", "pair_mean"),
    *("pairs_there", "pairwise", "ranked", "split_pairs"),
}
ROW_LENGTH = 56  # two pairs of the material


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model):
    return huggingface.Checkpoint(model).tokenizer


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """Answers that begin with a are better than those that begin with b."""
    directory = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(0)
    for name, size in (("train", 40), ("held_out", 12)):
        rows = []
        for _ in range(size):
            prompt, one, other = ("".join(rng.choice(list("cdef"), 3)) for _ in range(3))
            rows.append({"prompt": prompt, "chosen": f"a{one}", "rejected": f"b{other}"})
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text)
    return directory


def arguments(model, material, run_dir, **overrides):
    keys = {
        "model.path": str(model),
        "data.path": f"{material}/train.jsonl",
        "data.eval_path": f"{material}/held_out.jsonl",
        "run_dir": str(run_dir),
        "precision": "fp32",
        "train.steps": "12",
        "train.batch_size": "8",
        "train.row_length": str(ROW_LENGTH),
        "train.microbatch_tokens": str(2 * ROW_LENGTH),
        "optimizer.learning_rate": "0.01",
        "checkpoint.every": "4",
    }
    return list((keys | overrides).items())


def config(model, material, **overrides):
    return load(RewardModelConfig, overrides=arguments(model, material, "x", **overrides))


def read(rows, config, tokenizer, *, max_tokens=ROW_LENGTH):
    numbered = (Row(f"x:{i}", row) for i, row in enumerate(rows, start=1))
    return tokenize(numbered, tokenizer, config=config.data, max_tokens=max_tokens)


def packed_pairs(some, config):
    layout = make_layout(config.mesh)
    shape = supervised_shape(config, sizes=tiny.CONFIG, layout=layout, together=2)
    return pack_pairs(some, shape=shape)


USER = {"role": "user", "content": "cd"}


@pytest.mark.parametrize(
    ("row", "prompt_key"),
    [
        ({"prompt": "cd", "chosen": "a", "rejected": "bb"}, "prompt"),
        ({"prompt": [USER], "chosen": "a", "rejected": "bb"}, "prompt"),
        (
            {
                "prompt": [USER],
                "chosen": [{"role": "assistant", "content": "a"}],
                "rejected": [{"role": "assistant", "content": "bb"}],
            },
            "prompt",
        ),
        (
            {
                "prompt": "cd",
                "chosen": [USER, {"role": "assistant", "content": "a"}],
                "rejected": [USER, {"role": "assistant", "content": "bb"}],
            },
            "prompt",
        ),
        (
            {
                "chosen": [USER, {"role": "assistant", "content": "a"}],
                "rejected": [USER, {"role": "assistant", "content": "bb"}],
            },
            "none",
        ),
    ],
    ids=["texts", "messages", "answers as messages", "whole conversations", "no prompt"],
)
def test_every_form_of_a_pair_tokenizes_alike(row, prompt_key, model, tokenizer, material):
    given = config(model, material, **{"data.prompt_key": prompt_key})
    (pair,) = read([row], given, tokenizer).pairs
    for answer, text in ((pair.chosen, "a<end>"), (pair.rejected, "bb<end>")):
        assert tokenizer.decode(answer.prompt) == "u:cd;a:"
        assert tokenizer.decode(answer.completion) == text
        assert answer.action_mask.all()


def test_pairs_from_parquet_with_margins(model, tokenizer, material, tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"prompt": "cd", "chosen": "a", "rejected": "bb", "by": m} for m in (0.5, 2.0)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    keys = {"path": f"{tmp_path}/pairs.parquet", "margin_key": "by", "eval_path": "none"}
    given = config(model, material, **{f"data.{key}": value for key, value in keys.items()})
    found = load_pairs(given.data, tokenizer, max_tokens=ROW_LENGTH).training
    assert [pair.margin for pair in found.pairs] == [0.5, 2.0]
    batch = jax.device_get(packed_pairs(found.pairs, given).batch)
    row = int(np.argmax(batch.segments.max(axis=1)))
    ends = [batch.advantages[row][batch.segments[row] == s].sum() for s in (1, 2, 3, 4)]
    assert sorted(ends) == [0.0, 0.0, 0.5, 2.0]
    assert ends[1] == ends[3] == 0.0  # the chosen answers come first


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"prompt": "c", "chosen": "a"}, {}, "x:1: no 'rejected'"),
        ({"prompt": "c", "chosen": "a", "rejected": 3}, {}, "x:1: 'rejected' is 3"),
        ({"prompt": "c", "chosen": [USER], "rejected": "b"}, {}, "last message of 'chosen' is not"),
        (
            {
                "prompt": "c",
                "chosen": [USER, {"role": "assistant", "content": "a"}],
                "rejected": "b",
            },
            {},
            "'chosen' and 'rejected' have different prompts",
        ),
        (
            {
                "prompt": "c",
                "chosen": [USER, {"role": "assistant", "content": "a"}],
                "rejected": [USER, {"role": "assistant", "content": "b"}],
            },
            {},
            "the messages before the completion in 'chosen' differ from 'prompt'",
        ),
        ({"chosen": "a", "rejected": "b"}, {"data.prompt_key": "none"}, "'chosen' has no messages"),
        (
            {"prompt": "c", "chosen": "a", "rejected": "b", "m": "much"},
            {"data.margin_key": "m"},
            "'m' is 'much', expected a number",
        ),
        ({"prompt": "c" * 40, "chosen": "a", "rejected": "b"}, {}, "the 1 has more than 56 tokens"),
    ],
)
def test_malformed_pairs_are_named(row, keys, message, model, tokenizer, material):
    with pytest.raises(ValueError, match=message):
        read([row], config(model, material, **keys), tokenizer)


@pytest.fixture(scope="module")
def reward_model(model, material, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("reward_model")
    argv = [f"--{k}={v}" for k, v in arguments(model, material, run_dir)]
    assert main(["reward-model", *argv]) == 0
    return run_dir


def test_reward_model_learns_to_rank(reward_model, model, material, tokenizer, tmp_path):
    rows = read_metrics(reward_model / "metrics.jsonl")
    measured = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    assert measured[0] == 0.0  # a score of zero for all: nothing is ahead of anything
    assert measured[-1] == 1.0
    assert "score/margin" in rows[1] or "score/margin" in rows[2]

    # What is on the disk says the same, one text at a time.
    directory = tmp_path / "exported"
    assert main(["export", str(reward_model), str(directory), "--step", "best"]) == 0
    decoder_config, params = huggingface.load(directory, dtype=None)
    assert decoder_config.scored
    given = config(model, material)
    held_out = load_pairs(given.data, tokenizer, max_tokens=ROW_LENGTH).held_out
    one = config(model, material, **{"train.packing": "false"})
    batch = packed_pairs(held_out.pairs[:8], one).batch
    scores = np.asarray(
        sequence_scores(decoder(decoder_config), params, batch, precision=PRESETS["fp32"])
    )
    there = batch.segments.max(axis=1) == 2
    assert (scores[there, 1] > scores[there, 2]).all()
    assert there.sum() == 8


def test_dpo_raises_the_chosen_completions(model, material, tmp_path, capsys):
    keys = {"eval.every": "3", "checkpoint.keep": "9"}
    argv = [f"--{k}={v}" for k, v in arguments(model, material, tmp_path, **keys)]
    assert main(["dpo", *argv, "--loss", "sigmoid", "--loss.beta", "0.5"]) == 0
    assert "held-out pairs ranked correctly: 0.0 % -> 100.0 %" in capsys.readouterr().out
    rows = read_metrics(tmp_path / "metrics.jsonl")
    measured = [row for row in rows if "eval/accuracy" in row]
    # Any evaluated model may be the best, also between two checkpoints of every 4 steps.
    ranked = [
        p for p in tmp_path.glob("checkpoints/*/metrics/metrics") if "metric" in p.read_text()
    ]
    assert {int(path.parents[1].name) for path in ranked} == {3, 6, 9, 12}
    assert measured[0]["eval/reward/margin"] == 0.0  # the policy is its own reference
    assert measured[-1]["eval/reward/margin"] > 0.5
    moved = measured[-1]["eval/logprobs/rejected"] - measured[0]["eval/logprobs/rejected"]
    ahead = measured[-1]["eval/reward/rejected"] / 0.5
    np.testing.assert_allclose(moved, ahead, rtol=1e-3)  # so the reference is the first policy
    assert not huggingface.Checkpoint(tmp_path / "model").config.scored


@pytest.mark.parametrize("loss", ["bco", "aot_unpaired"])
def test_losses_of_the_whole_batch_learn_too(loss, model, material, tmp_path, capsys):
    argv = [f"--{k}={v}" for k, v in arguments(model, material, tmp_path)]
    assert main(["dpo", *argv, "--loss", loss, "--loss.beta", "0.5"]) == 0
    assert "held-out pairs ranked correctly: 0.0 % -> 100.0 %" in capsys.readouterr().out


def state(run_dir, step):
    with StandardCheckpointer() as reader:
        return reader.restore(run_dir / "checkpoints" / str(step) / "state")


def interrupt_in_sixth_step(monkeypatch):
    real = pairs.pack_minibatch

    def interrupted(*arguments, **named):
        interrupted.calls += 1
        if interrupted.calls == 8:  # two batches are held-out pairs
            signal.raise_signal(signal.SIGINT)
        return real(*arguments, **named)

    interrupted.calls = 0
    monkeypatch.setattr(pairs, "pack_minibatch", interrupted)


def test_interrupted_and_resumed_equals_undisturbed(
    reward_model, model, material, tmp_path, monkeypatch, capsys
):
    argv = ["reward-model", *(f"--{k}={v}" for k, v in arguments(model, material, tmp_path))]
    interrupt_in_sixth_step(monkeypatch)
    assert main(argv) == 128 + signal.SIGINT
    assert (
        "ended by signal 2 at step 6; rerun the same command to resume" in capsys.readouterr().out
    )
    assert not (tmp_path / "model").exists()
    assert main([*argv, "--optimizer.learning_rate=0.02"]) == 1
    assert "optimizer.learning_rate = 0.01 there and 0.02 here" in capsys.readouterr().err
    assert main(argv) == 0
    ours, undisturbed = state(tmp_path, 12), state(reward_model, 12)
    jax.tree.map(np.testing.assert_array_equal, ours, undisturbed)
    a, b = (d / "model" / "model.safetensors" for d in (tmp_path, reward_model))
    assert a.read_bytes() == b.read_bytes()
    # A run that is done only writes its model again.
    a.unlink()
    assert main(argv) == 0
    assert a.read_bytes() == b.read_bytes()


def test_reward_model_of_adapters(model, material, tokenizer, tmp_path, monkeypatch):
    """Interrupted, resumed, merged; a scorer computes with it as PEFT's files say."""
    one, other = tmp_path / "one", tmp_path / "other"
    lora_keys = {"lora.rank": "4", "lora.alpha": "8", "precision": "bf16_master"}
    given = {
        run: [f"--{k}={v}" for k, v in arguments(model, material, run, **lora_keys)]
        for run in (one, other)
    }
    assert main(["reward-model", *given[one]]) == 0
    measured = [row.get("eval/accuracy") for row in read_metrics(one / "metrics.jsonl")]
    assert measured[0] == 0.0
    assert measured[-1] == 1.0

    with monkeypatch.context() as patched:
        interrupt_in_sixth_step(patched)
        assert main(["reward-model", *given[other]]) == 128 + signal.SIGINT
    assert main(["reward-model", *given[other]]) == 0
    jax.tree.map(np.testing.assert_array_equal, state(other, 12), state(one, 12))
    trained = state(one, 12)["params"]
    assert set(trained) == {"layers", "score"}
    assert all(name[-2:] in ("_a", "_b") for name in trained["layers"])

    assert main(["export", str(one), str(tmp_path / "merged")]) == 0
    assert main(["export", str(one), str(tmp_path / "adapter"), "--adapter"]) == 0
    for ours, theirs in (("merged", "model"), ("adapter", "adapter")):
        (a,), (b,) = (d.glob("*.safetensors") for d in (tmp_path / ours, one / theirs))
        assert a.read_bytes() == b.read_bytes()

    keys = {"model.path": model, "data.path": "x", "reward.model": one / "model"}
    given_to = load(Config, overrides=[(key, str(value)) for key, value in keys.items()])
    layout = make_layout(MeshConfig())
    scorer, params = load_scorer(given_to, find_models(given_to), layout=layout, output="scores")
    pairs_config = config(model, material, **{"train.packing": "false"})
    held_out = load_pairs(pairs_config.data, tokenizer, max_tokens=ROW_LENGTH).held_out
    batch = packed_pairs(held_out.pairs[:8], pairs_config).batch
    scores = np.asarray(sequence_scores(scorer, params, batch, precision=given_to.precision))
    there = batch.segments.max(axis=1) == 2
    assert there.sum() == 8
    assert (scores[there, 1] > scores[there, 2]).all()


def test_packing_and_microbatches_change_nothing(model, material, tokenizer):
    given = {
        "packed": config(model, material),
        "unpacked": config(
            model,
            material,
            **{"train.packing": "false", "train.microbatch_tokens": str(8 * ROW_LENGTH)},
        ),
    }
    found = load_pairs(given["packed"].data, tokenizer, max_tokens=ROW_LENGTH).training
    chosen = [pair._replace(margin=i / 4) for i, pair in enumerate(found.pairs[:8])]
    decoder_config, params = huggingface.load(model, dtype=np.dtype("float32"), scored=True)
    params["score"] = jax.random.normal(jax.random.key(0), params["score"].shape)
    steps = {}
    for name, one in given.items():
        learner = make_ranker(
            decoder(decoder_config),
            center_rewards=0.1,
            optimizer=optax.sgd(1.0),
            precision=PRESETS["fp32"],
        )
        minibatch = packed_pairs(chosen, one)
        state, metrics = jax.jit(learner.step)(learner.init(params), minibatch)
        steps[name] = (int(minibatch.microbatches), state.params, to_floats(metrics))
    (few, packed, a), (many, unpacked, b) = steps["packed"], steps["unpacked"]
    assert (few, many) == (2, 1)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), packed, unpacked
    )
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert a["grad_norm"] > 0.1


def test_losses_by_name():
    def given(*keys):
        required = [("model.path", "m"), ("data.path", "d")]
        return load(DPOConfig, overrides=[*required, *keys]).loss

    assert load_loss(given()).beta == 0.1
    assert load_loss(given(("loss.name", "ipo_summed"), ("loss.beta", "0.3"))).beta == 0.3
    with pytest.raises(ValueError, match="did you mean ipo"):
        load_loss(given(("loss.name", "ipp")))
    with pytest.raises(ValueError, match=r"loss\.label_smoothing: hinge has no such parameter"):
        load_loss(given(("loss.name", "hinge"), ("loss.label_smoothing", "0.1")))
    with pytest.raises(ValueError, match=r"loss\.beta = 'x': expected float"):
        load_loss(given(("loss.beta", "x")))
    losses = set(preference.__all__) - PARTS_OF_LOSSES
    assert len(losses) == 20
    for name in losses:
        assert load_loss(given(("loss.name", name), ("loss.beta", "0.3"))).beta == 0.3
        for beta in ("-1.0", "0"):
            with pytest.raises(ValueError, match=rf"beta={beta} must be > 0"):
                load_loss(given(("loss.name", name), ("loss.beta", beta)))
    with pytest.raises(ConfigError, match=r"eval\.every = 5 needs data\.eval_path"):
        given(("eval.every", "5"))


def test_reward_model_is_not_a_language_model(reward_model):
    layout = make_layout(MeshConfig())
    checkpoint = huggingface.Checkpoint(reward_model / "model")
    with pytest.raises(ValueError, match="is a reward model; a causal language model is required"):
        load_model(checkpoint, layout=layout, dtype=np.dtype("float32"))
