"""The whole path on a tiny model: sample, reward, learn, publish, evaluate, save, export."""

import functools
import json
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.monitoring
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file

from jaxrl import huggingface, train
from jaxrl.cli import main
from jaxrl.commands.train import _conclude
from jaxrl.config import toml_file
from jaxrl.config.training import Config
from jaxrl.core.hosts import Hosts
from jaxrl.core.precision import parse
from jaxrl.models import spec
from jaxrl.tracking import samples
from jaxrl.tracking.tracker import read_metrics
from jaxrl.training.run import open_run
from jaxrl.training.run_directory import ResumeError, check_config, lock
from tests import tiny
from tests.documented import undocumented
from tests.run_config import run_config

# GSM8K's shape: the answer is a solution that ends with #### and a number.
QUESTIONS = [
    {"question": f"what is {a} + {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"}
    for a in range(4)
    for b in range(4)
]
REWARD = """
def fewer_tokens(completion, example):
    assert "question" in example and example["answer"].count("####") == 1
    if example["answer"].endswith("#### 5"):
        raise ValueError("this one cannot be scored")
    return -float(len(completion))
"""
LOSS = """
import jax.numpy as jnp
from jaxrl.losses import kl_penalty, over_sampler, surrogate

def soft_clip(*, width: float = 1.0, kl: float = 0.01):
    policy = surrogate(lambda r, a: -width * jnp.tanh((r - 1) / width) * a, over_sampler)
    return policy + kl * kl_penalty()
"""


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("material")
    tiny.write_checkpoint(directory / "model")
    lines = "".join(json.dumps(row) + "\n" for row in QUESTIONS)
    (directory / "questions.jsonl").write_text(lines)
    (directory / "rewards.py").write_text(REWARD)
    (directory / "losses.py").write_text(LOSS)
    return directory


def config(material: Path, run_dir: Path, **changes: str) -> Config:
    own = {
        "run_dir": run_dir,
        "data.path": material / "questions.jsonl",
        "data.eval_path": material / "questions.jsonl",
        "data.eval_limit": 4,
        "data.prompt_key": "question",
        "data.max_prompt_tokens": 24,
        "reward.path": f"{material}/rewards.py:fewer_tokens",
        "train.microbatch_tokens": 128,
    }
    return run_config(material, **own | changes)


@pytest.fixture(scope="module")
def compiled() -> Iterator[Counter[tuple[str, str]]]:
    """Counts compilations by program and thread."""
    found: Counter[tuple[str, str]] = Counter()

    def count(event: str, seconds: float, **about: str) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            thread, _, _ = threading.current_thread().name.partition("_")  # without its number
            found[about["fun_name"], thread] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    yield found
    jax.monitoring.unregister_event_duration_listener(count)


@pytest.fixture(scope="module")
def finished(material, compiled, tmp_path_factory) -> tuple[Path, train.Result]:
    """A run with every optional part: a user's loss and reward, a reference, mini-batches."""
    run_dir = tmp_path_factory.mktemp("runs") / "whole"
    changes = {
        "loss.name": f"{material / 'losses.py'}:soft_clip",
        "loss.width": "0.5",
        "train.updates_per_rollout": "2",
        "eval.every": "1",
        "probe.every": "1",
        "samples.every": "1",
        "train.profile_steps": "2,2",
    }
    evaluate = train.evaluate

    def interrupted(run, progress, **given):
        if progress.step == 2:  # after the last step, which a signal cannot end early
            signal.raise_signal(signal.SIGTERM)
        return evaluate(run, progress, **given)

    native = jax.profiler.ProfileOptions()
    native.python_tracer_level = 0  # to write every call of Python takes longer than the run
    begin = functools.partial(jax.profiler.start_trace, profiler_options=native)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "evaluate", interrupted)
        patch.setattr(samples, "_MOST_TOKENS", 4)
        patch.setattr(jax.profiler, "start_trace", begin)
        return run_dir, train.train(config(material, run_dir, **changes))


def test_run_leaves_model_metrics_picture_and_checkpoint(finished):
    run_dir, result = finished
    assert result.step == 2
    assert result.signum is None
    assert result.final_accuracy is not None
    assert (run_dir / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert list((run_dir / "tensorboard").iterdir())
    assert {p.name for p in (run_dir / "checkpoints").iterdir()} >= {"2"}
    entries = read_metrics(run_dir / "metrics.jsonl")
    assert [e["step"] for e in entries if "reward" in e] == [1, 2]
    assert [e["step"] for e in entries if "eval/accuracy" in e] == [0, 1, 2]
    last = next(e for e in entries if e["step"] == 2 and "reward" in e)
    assert abs(last["probe/beta_std"]) < 1e-6  # the same numbers on both sides
    assert last["probe/phantom"] == 0
    assert "probe/drift" not in last
    for name in (
        "mismatch/k3_kl",
        "probe/alpha_std",
        "kl",
        "grad_norm",
        "completion_length",
        "learning_rate",
        "time/sample",
        "diversity/distinct",
        "entropy/sampled",
    ):
        assert np.isfinite(last[name]), name
    entries = [e for e in entries if "event" not in e]  # the alarm of failed rewards
    assert undocumented({name for e in entries for name in e}) == ["step", "time"]
    assert last["time/score"] + last["time/update"] <= last["time/learn"]
    # 4 of the 16 answers end in 5; their failed rewards are counted.
    assert sum(e.get("reward/failed", 0) for e in entries) % 4 == 0


def test_learner_compiles_once_beside_the_sampler(finished, compiled):
    # One score is of longer rows.
    programs = {"jit(score)": 2, "jit(shadow_scores)": 1, "jit(step)": 1}
    assert {
        (name, thread): count for (name, thread), count in compiled.items() if name in programs
    } == {(name, "compile-ahead"): count for name, count in programs.items()}


def test_run_leaves_samples_trace_and_versions(finished):
    run_dir, _ = finished
    found = read_metrics(run_dir / "samples.jsonl")
    samples = [s for s in found if "held_out" not in s]
    assert [s["step"] for s in samples] == [1] * 8 + [2] * 8  # four of each of two prompts
    assert [len({s["group"] for s in samples if s["step"] == n}) for n in (1, 2)] == [2, 2]
    for sample in samples:
        assert len(sample["tokens"]) == len(sample["advantages"]) == len(sample["betas"])
        for entropy, advantage in zip(sample["entropies"], sample["advantages"], strict=True):
            assert (entropy is None) == (advantage is None)
            assert entropy is None or 0 < entropy < np.log(tiny.CONFIG.vocab_size)
        assert len(sample["tokens"]) == min(4, sample["length"])
        assert sample["prompt"].startswith("u:what is")
        # Learner and sampler compute alike; a completion without a reward is masked.
        assert all(beta is None or abs(beta) < 1e-5 for beta in sample["betas"])
        assert (sample["advantages"][0] is None) == (sample["reward"] is None)
        assert sample["actions"] == [advantage is not None for advantage in sample["advantages"]]
        assert sample["group_size"] == 4
        group = (sample["step"], sample["group"])
        rewards = [s["reward"] for s in samples if (s["step"], s["group"]) == group]
        known = [reward for reward in rewards if reward is not None]  # all four are logged
        assert sample["group_mean"] == (pytest.approx(np.mean(known)) if known else None)
    held_out = [s for s in found if "held_out" in s]
    steps = {step: [s for s in held_out if s["step"] == step] for step in (0, 1, 2)}
    assert sum(map(len, steps.values())) == len(held_out)
    prompts = [[(s["prompt"], s["answer"]) for s in some] for some in steps.values()]
    assert prompts[0] == prompts[1] == prompts[2]
    assert len(set(prompts[0])) == len(prompts[0]) == 4
    accuracy = np.mean([s["reward"] or 0.0 for s in steps[2]])  # of all held-out prompts
    assert accuracy == pytest.approx(finished[1].final_accuracy)
    known = [s for s in samples if s["step"] == 1 and s["reward"] is not None]
    assert known[0]["reward"] <= known[-1]["reward"]
    assert known[0]["advantages"][0] <= known[-1]["advantages"][0]
    assert list((run_dir / "profile").rglob("perfetto_trace.json.gz"))
    (start, *_) = read_metrics(run_dir / "starts.jsonl")
    assert (start["step"], start["devices"]) == (0, "1 x cpu")
    assert start["versions"]["jax"] == jax.__version__


def test_failed_rewards_are_masked_and_reported(material, tmp_path, capsys):
    only = tmp_path / "five.jsonl"
    rows = [q for q in QUESTIONS if q["answer"].endswith("#### 5")]
    rows = [QUESTIONS[0], QUESTIONS[1], *rows]
    only.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"data.path": str(only), "train.train_batch": "4", "train.steps": "1"}
    changes["data.eval_path"] = str(only)
    result = train.train(config(material, tmp_path / "run", **changes))
    entries = read_metrics(tmp_path / "run/metrics.jsonl")
    (entry,) = [e for e in entries if "reward" in e]
    assert (entry["reward/failed"], entry["completions"]) == (8, 16)
    evaluated = [e for e in entries if "eval/accuracy" in e]
    assert [(e["eval/failed"], e["eval/completions"]) for e in evaluated] == [(2, 4)] * 2
    assert [e["event"]["alarm"] for e in entries if "event" in e] == ["failed_rewards"]
    told = capsys.readouterr().err
    assert "step 1: reward fewer_tokens: 8 of 16 failed, first: reward fewer_tokens" in told
    assert "step 1, held-out prompts: 2 of 4 completions could not be scored and count" in told
    assert "this one cannot be scored" in told
    last = _conclude(result, run_dir="run")[0].splitlines()[1]
    assert last.count(" % (2 of 4 could not be scored)") == 2


def test_exported_model_keeps_its_logits(finished):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run_dir, result = finished
    assert result.model == run_dir / "model"
    theirs = AutoModelForCausalLM.from_pretrained(result.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    ids = tokenizer.encode("what is 2 + 2?")
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()

    from jaxrl import huggingface
    from jaxrl.core.precision import PRESETS
    from jaxrl.models.model import decoder

    found, params = huggingface.load(result.model, dtype=None)
    model = decoder(found)
    tokens = np.array([ids], np.int32)
    positions = np.arange(len(ids), dtype=np.int32)[None]
    hidden = jax.jit(model.hidden, static_argnames="precision")(
        params, tokens, positions, np.ones_like(tokens), precision=PRESETS["fp32"]
    )
    ours = np.asarray(hidden[0] @ model.unembedding(params).T)
    np.testing.assert_allclose(ours, expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


def test_finished_run_is_not_trained_again(finished, material, capsys):
    run_dir, result = finished
    resolved = toml_file.load(Config, file=run_dir / "config.toml")
    again = train.train(resolved)
    assert again.step == result.step
    assert "nothing to trace, the run has done 2 of 2 steps" in capsys.readouterr().err
    assert again.final_accuracy == result.final_accuracy
    steps = [e["step"] for e in read_metrics(run_dir / "metrics.jsonl") if "reward" in e]
    assert steps == [1, 2]


def test_resuming_with_another_config_is_refused(finished, material):
    run_dir, _ = finished
    with pytest.raises(ResumeError, match=r"optimizer\.learning_rate = 0\.01 there and 0\.02 here"):
        train.train(
            toml_file.load(
                Config,
                file=run_dir / "config.toml",
                overrides=[("optimizer.learning_rate", "0.02")],
            )
        )


def test_without_checkpoints_the_config_may_change(material, tmp_path):
    check_config(tmp_path, config(material, tmp_path))
    (tmp_path / "checkpoints").mkdir()
    check_config(tmp_path, config(material, tmp_path, seed="1"))
    (tmp_path / "checkpoints" / "1").mkdir()
    with pytest.raises(ResumeError, match="seed = 1 there and 0 here"):
        check_config(tmp_path, config(material, tmp_path))


def test_fewer_steps_than_done_are_refused(material, tmp_path):
    check_config(tmp_path, config(material, tmp_path))
    (tmp_path / "checkpoints" / "9").mkdir(parents=True)
    check_config(tmp_path, config(material, tmp_path, **{"train.steps": "9"}))
    with pytest.raises(ResumeError, match=r"train\.steps = 8, and the run in .* has done 9 steps"):
        check_config(tmp_path, config(material, tmp_path, **{"train.steps": "8"}))


def test_changed_values_are_told_as_the_config_writes_them(material, tmp_path):
    first = {"reward.path": "fewer_tokens.py:a", "data.system_prompt": "Short.", "loss.kl": "none"}
    check_config(tmp_path, config(material, tmp_path))
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    del first["loss.kl"]
    with pytest.raises(ResumeError) as error:
        check_config(tmp_path, config(material, tmp_path, **first))
    assert "data.system_prompt = none there and 'Short.' here" in str(error.value)
    assert "there and ['fewer_tokens.py:a'] here" in str(error.value)


def test_free_keys_may_change(material, tmp_path):
    assert check_config(tmp_path, config(material, tmp_path)) is None
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    free = {"sampler.url": "http://10.0.0.2:8000", "probe.every": "3", "sampler.name": "vllm"}
    with pytest.raises(ResumeError, match=r"config: sampler\.name = 'embedded' there"):
        check_config(tmp_path, config(material, tmp_path, **free))
    del free["sampler.name"]
    assert check_config(tmp_path, config(material, tmp_path, **{"probe.every": "3"})) is None
    order = {"train.microbatch_tokens": "64", "train.remat": "layer"}
    note = check_config(tmp_path, config(material, tmp_path, **order))
    assert "train.microbatch_tokens = 128 there and 64 here; train.remat" in note
    assert "same up to rounding" in note


def test_run_directory_is_locked(material, tmp_path):
    run_dir = tmp_path / "run"
    with lock(run_dir, Hosts()):
        with pytest.raises(ResumeError, match=r"another program trains in .*/run;"):
            train.train(config(material, run_dir))
        assert not list(run_dir.iterdir())
    assert not run_dir.exists()
    with lock(run_dir, Hosts()):  # the lock does not outlive its program's use
        pass


def test_unavailable_kernel_fails_early(material, tmp_path):
    with pytest.raises(ValueError, match=r"'splash' is for TPUs, .* platform 'cpu'; use 'auto'"):
        train.train(config(material, tmp_path / "run", **{"train.attention": "splash"}))
    assert not (tmp_path / "run").exists()


def test_too_long_completions_are_refused_early(material, tmp_path):
    positions = tiny.CONFIG.max_positions
    keys = {"sampling.max_tokens": str(positions), "train.microbatch_tokens": str(2 * positions)}
    given = config(material, tmp_path / "run", **keys)
    with pytest.raises(ValueError, match=rf"sampling\.max_tokens = {positions} are more than the"):
        train.train(given)
    assert not (tmp_path / "run").exists()


def test_mismatched_precision_is_reported_and_measured(material, tmp_path, capsys):
    changes = {"precision": "phantom", "train.steps": "1", "probe.every": "1"}
    train.train(config(material, tmp_path / "run", **changes))
    said = capsys.readouterr().err
    assert "compute = f32, activations = f32 and sampler = bf16" in said
    assert "devices: 1 x cpu, attention by xla" in said
    (entry,) = [e for e in read_metrics(tmp_path / "run/metrics.jsonl") if "reward" in e]
    assert entry["probe/beta_std"] > 1e-4
    assert 0 < entry["probe/drift"] < 1  # of a gradient that is not 0
    assert entry["mismatch/token_mult_error"] > 1


def test_adapters_are_trained_resumed_and_exported(material, tmp_path):
    whole, more, out = (tmp_path / name for name in ("whole", "more", "out"))
    adapter, model = "adapter/adapter_model.safetensors", "model/model.safetensors"
    keys = {"lora.rank": "2", "lora.targets": '["*_proj", "lm_head"]', "precision": "bf16_master"}
    keys |= {"loss.kl": "0.1", "data.eval_limit": "1", "train.train_batch": "2"}
    keys |= {"checkpoint.every": "1"}
    train.train(config(material, whole, **keys))
    first = {file: (whole / file).read_bytes() for file in (adapter, model)}
    shutil.rmtree(whole / "checkpoints" / "2")
    train.train(config(material, whole, **keys))
    assert {file: (whole / file).read_bytes() for file in first} == first
    steps = [e for e in read_metrics(whole / "metrics.jsonl") if "reward" in e]
    # The reference is the model without its adapters.
    assert steps[0]["kl"] == 0
    assert steps[1]["kl"] > 0
    tensors = load_file(whole / adapter)
    assert all(np.any(x) for x in tensors.values())  # B was 0
    bf16 = parse("bf16").wire
    loaded = [huggingface.load(d / "model", dtype=bf16) for d in (material, whole)]
    (tied, before), (untied, after) = loaded
    assert (tied.tied, untied.tied) == (True, False)
    assert not np.array_equal(after.pop("head"), after["embed"])
    same = jax.tree.map(lambda x, y: bool((x == y).all()), before, after)
    layers = same.pop("layers")
    assert all(same.values())
    assert {name for name, kept in layers.items() if not kept} == {*"qkvo", "gate", "up", "down"}
    assert main(["export", str(whole), str(out / "model")]) == 0
    assert main(["export", str(whole), str(out / "adapter"), "--adapter"]) == 0
    assert {file: (out / file).read_bytes() for file in first} == first
    begun = config(material, more, **keys | {"lora.path": str(out / "adapter")})
    with open_run(begun) as (run, state, _):
        params = state.policy.params
        given = traverse_util.flatten_dict(params.adapters, sep="/")
        assert {x.dtype for x in jax.tree.leaves(params.frozen)} == {bf16}
    for path, one in spec.flatten(run.learning.specs.adapters).items():
        stored = np.reshape([tensors[name] for name in one.hf_names()], one.shape)
        np.testing.assert_array_equal(given[path], stored)
