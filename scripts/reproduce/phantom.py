"""Phantom clipping: the grid's rows, its models and prompts, its table and its checks."""

import random
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import jax
import jax.numpy as jnp
import make_arithmetic
import numpy as np
from experiments.runs import CONFIGS, config, finished, markdown, rollouts, spread, trained
from reproduce import scoring
from reproduce.grid import Entries, curve, early, found

from jaxrl.builders.servers import StartingServer, starting_server
from jaxrl.config.sampler import ServerConfig
from jaxrl.core import Precision, TokenBatch
from jaxrl.huggingface import Checkpoint
from jaxrl.losses import Ratio, Scores, on_policy, over_anchor, over_sampler, shadowed
from jaxrl.training.run import open_run

CONFIG = CONFIGS / "phantom_clipping.toml"
# Deep, narrow and with large weights: rounding is large compared with a layer's contribution.
DEEP = make_arithmetic.MODEL | {
    "num_hidden_layers": 24,
    "hidden_size": 32,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "initializer_range": 0.5,
}
FAILURE = "f32 learner, bf16 sampler, clipped"
CONTROL = "sampler in f32, clipped"
SHADOWED = "shadowed ratio, clipped"
CENTRED = "score centering, r = 1"
GATED = "gated steps, clip off"
EXACT_BLOCKS = "bf16_master,blocks=e4m3,sums=fixed, clipped"
BLOCKS = "bf16_master,blocks=e4m3, clipped"
INTEGERS = [f"{name},blocks=int8" for name in ("fp32", "bf16_master", "fp16_master")]
ROWS: dict[str, dict[str, str]] = {  # keys that differ from the config file
    FAILURE: {},
    CONTROL: {"precision": "fp32"},
    "beta removed: ratio over the anchor, clipped": {"loss.ratio": "over_anchor"},
    "r = 1": {"loss.ratio": "on_policy"},
    "clip off": {
        "loss.clip_low": "1.0",
        "loss.clip_high": "1e6",
        "probe.clip_range": "0.999999,1e6",
    },
    "wide clip: .4 to 2.5": {
        "loss.clip_low": "0.6",
        "loss.clip_high": "1.5",
        "probe.clip_range": "0.6,1.5",
    },
    SHADOWED: {"loss.ratio": "shadowed"},
    GATED: {
        "loss.clip_low": "1.0",
        "loss.clip_high": "1e6",
        "probe.clip_range": "0.999999,1e6",
        "train.gate": "true",
    },
    "bf16_master, clipped": {"precision": "bf16_master"},
    "fp16_master, clipped": {"precision": "fp16_master"},
    CENTRED: {
        "loss.name": str(Path(__file__).with_name("centred.py")) + ":centred",
        "loss.ratio": "on_policy",
    },
    EXACT_BLOCKS: {"precision": "bf16_master,blocks=e4m3,sums=fixed"},
    BLOCKS: {"precision": "bf16_master,blocks=e4m3"},
    **{f"{p}, clipped": {"precision": p} for p in INTEGERS},
}
EIGHT_BITS = (CENTRED, GATED, EXACT_BLOCKS, BLOCKS)  # rows for the coarser sampler alone
SERVED_INTEGERS = [f"{precision}, clipped" for precision in INTEGERS]
# A coarser sampler: weights rounded to 8 bits, as in engines with quantised weights.
COARSE = {"precision": "phantom,wire=f8_e4m3"}
SAMPLERS = {
    "vllm": [row for row in ROWS if row not in (*EIGHT_BITS, *SERVED_INTEGERS)],
    "embedded": [row for row in ROWS if row not in (*EIGHT_BITS, *SERVED_INTEGERS)],
    "fp8": [row for row in ROWS if row in EIGHT_BITS or "precision" not in ROWS[row]],
    "int8": SERVED_INTEGERS,  # vLLM in the same 8 bits as the learner
}
MATCHED = {"bf16_master": "bf16_master, clipped", "fp16_master": "fp16_master, clipped"}
NEAR = 0.1  # of the first rollout's length counts as within 10 % of the optimum


def write_material(directory: Path, *, model: Mapping, seeds: Sequence[int]) -> None:
    """Writes a random model for each seed, and 64 prompts."""
    for seed in seeds:
        if not (directory / f"model-{seed}").exists():
            make_arithmetic.write_model(directory / f"model-{seed}", dict(model), seed=seed)
    rng = random.Random(0)
    rows = [{"prompt": f"{rng.randint(100, 999)}+{rng.randint(100, 999)}="} for _ in range(64)]
    make_arithmetic.write_rows(directory / "prompts.jsonl", rows)


def row_dir(directory: Path, row: str, *, seed: int | str) -> Path:
    """Names the directory of a run."""
    words = re.findall(r"[a-z0-9_]+", row.split(":")[0])
    return directory / f"{'-'.join(words)}-{seed}"


def row_keys(
    material: Path, row: str, *, run_dir: Path, seed: int, more: Mapping
) -> dict[str, object]:
    """Returns the config keys of a row with a seed and `more` keys."""
    keys = {
        "seed": seed,
        "run_dir": run_dir,
        "model.path": material / f"model-{seed}",
        "data.path": material / "prompts.jsonl",
    }
    return {**keys, **more, **ROWS[row]}


def run_row(material: Path, row: str, *, run_dir: Path, seed: int, more: Mapping) -> Entries:
    """Trains a row, with the keys of `row_keys`."""
    keys = row_keys(material, row, run_dir=run_dir, seed=seed, more=more)
    return rollouts(trained(CONFIG, keys))


def train_rows(directory: Path, *, sampler: str, seeds: Sequence[int]) -> None:
    """Trains a sampler's missing runs, row by row. vLLM has a server for each dtype and form of
    operands, started by the first row that needs it."""
    urls: dict[tuple[np.dtype, str], str] = {}
    with ExitStack() as servers:
        for row, seed in ((row, seed) for row in SAMPLERS[sampler] for seed in seeds):
            run_dir = row_dir(directory / sampler, row, seed=seed)
            if finished(run_dir):
                continue
            more = COARSE if sampler == "fp8" else {}
            if sampler in ("vllm", "int8"):
                precision = Precision.parse(ROWS[row].get("precision", "phantom"))
                served = precision.sampler, precision.blocks
                if served not in urls:
                    starting = servers.enter_context(_server(directory, *served))
                    urls[served] = starting.wait().url
                more = {"sampler.name": "vllm", "sampler.url": urls[served]}
            run_row(directory, row, run_dir=run_dir, seed=seed, more=more)


def _server(
    directory: Path, dtype: np.dtype, blocks: str
) -> AbstractContextManager[StartingServer]:
    return starting_server(
        ServerConfig(kv_cache_bytes=64 << 20),
        Checkpoint(directory / "model-0"),
        dtype=dtype,
        blocks=blocks,
        log=directory / f"vllm-{dtype.name}-{blocks}.log",
        note=print,
        max_model_len=64,
    )


def found_rows(directory: Path, *, sampler: str) -> dict[str, list[Entries]]:
    """Reads the finished runs of every row, sorted by seed."""
    patterns = {row: row_dir(Path(), row, seed="[0-9]*").name for row in ROWS}
    return found(directory / sampler, patterns)


def steps_to_near(entries: Entries) -> float:
    """Counts rollouts until the mean length is a tenth of the first one's, or infinity."""
    lengths = np.array([-e["reward"] for e in entries])
    near = np.flatnonzero(lengths <= NEAR * lengths[0])
    return float(near[0] + 1) if near.size else np.inf


def probed(row: str, entries: Entries, name: str) -> float:
    """Averages a probe's share over the first ten rollouts, for the row's own loss."""
    # The probe counts tokens that the ratio over the sampler would clip. The shadowed ratio clips a
    # part of them, since JAX and the sampler differ even in one dtype; the others use no sampler.
    if row == SHADOWED and name != "probe/phantom":
        return float("nan")
    return early([entries], name)[0] if "loss.ratio" not in ROWS[row] else 0.0


def table(results: Mapping[str, Sequence[Entries]]) -> str:
    """Formats a line for each row of the grid, over its seeds."""
    rows = []
    for row, runs in results.items():
        lengths = -curve(runs, "reward").mean(axis=0)
        shown = [i for i in (0, 4, 9, 14, 19) if i < len(lengths) - 1]
        course = ", ".join(f"{lengths[i]:.1f}" for i in (*shown, -1))
        last = curve(runs, "reward")[:, -5:].mean(axis=1)
        reached = sorted(steps_to_near(run) for run in runs)
        near = ", ".join("never" if np.isinf(r) else f"{r:.0f}" for r in reached)
        clips = [sum(early([run], clip)[0] for clip in ("clip/low", "clip/high")) for run in runs]
        rows.append(
            {
                "row": row,
                "length at rollout 1, 5, 10, 15, 20, last": course,
                "reward of the last 5": spread(last, "{:.1f}"),
                "rollouts to within 10 %": near,
                "clipped, 1-10": spread(clips),
                "before an update, 1-10": spread([probed(row, r, "probe/clipped") for r in runs]),
                "phantom, 1-10": spread([probed(row, r, "probe/phantom") for r in runs]),
                "beta mean": spread(early(runs, "probe/beta"), "{:+.3f}"),
                "beta std": spread(early(runs, "probe/beta_std")),
                "beta p99": spread(early(runs, "probe/beta_p99"), "{:.2f}"),
            }
        )
    return markdown(rows)


SMALL = DEEP | {"num_hidden_layers": 4}
SHORT = {
    "sampling.temperature": "0.2",
    "sampling.max_tokens": "24",
    "train.microbatch_tokens": "512",
}


def check_directions(directory: Path) -> list[str]:
    """Measures phantom fractions of one rollout of a small model and of short runs.

    Returns:
      Lines to print.

    Raises:
      AssertionError: if one has the wrong direction.
    """
    write_material(directory, model=SMALL, seeds=[0])
    keys = {"model.path": directory / "model-0", "data.path": directory / "prompts.jsonl"}
    keys |= {"run_dir": directory / "scored", **SHORT}
    with open_run(config(CONFIG, keys)) as (run, state, progress):
        batch = scoring.minibatch(run, scoring.sampled(run, progress))
        scored = scoring.score(run, state.policy, batch)
    known = jax.tree.map(lambda x: jnp.asarray(np.nan_to_num(x), jnp.float32), scored)
    scores = Scores(logprobs=known.learner, shadow=known.shadow, anchor=known.learner)
    shares = {
        name: phantom_share(ratio, scores, batch.batch)
        for name, ratio in (
            ("over the sampler", over_sampler),
            ("over the anchor: beta removed", over_anchor),
            ("r = 1", on_policy),
            ("shadowed", shadowed),
        )
    }
    more = SHORT | {"train.steps": "2", "train.updates_per_rollout": "1", "probe.every": "1"}
    for row in (FAILURE, CONTROL):
        run_dir = row_dir(directory, row, seed=0)
        entries = run_row(directory, row, run_dir=run_dir, seed=0, more=more)
        shares[f"run, {row}"] = max(e["probe/phantom"] for e in entries)
    failing = {"over the sampler", f"run, {FAILURE}"}
    for name, share in shares.items():
        # How much two dtypes differ depends on the processor: .003 of all tokens and more.
        assert share > 0.001 if name in failing else share == 0, shares
    return [f"phantom fraction {share:.4f}: {name}" for name, share in shares.items()]


def phantom_share(ratio: Ratio, scores: Scores, batch: TokenBatch) -> float:
    """Computes the share of action tokens that this ratio clips at .2 but the policy's own change,
    shadow - sampler, would not."""
    moved = jnp.exp(scores.shadow - batch.sampler_logprobs)
    up, down = batch.advantages > 0, batch.advantages < 0

    def clipped(r: jax.Array) -> jax.Array:
        return (up & (r > 1.2)) | (down & (r < 0.8))

    phantoms = clipped(ratio.value(scores, batch)) & ~clipped(moved)
    return float(jnp.sum(phantoms & batch.action_mask) / jnp.sum(batch.action_mask))
