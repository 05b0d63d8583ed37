"""Measures the effect of routing replay before any update: one rollout of random mixtures of
experts, scored with and without the sampler's experts.

    python scripts/reproduce_routing_replay.py runs/routing

Takes ten minutes and prints the table of docs/results/scale.md, Routing replay.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import make_arithmetic
import numpy as np
from experiments.runs import CONFIGS, config, markdown, plain_parser
from reproduce import scoring
from reproduce.phantom import DEEP, write_material

from jaxrl.core import Minibatch, Rollout, cast
from jaxrl.diagnostics import split, split_log_ratio
from jaxrl.training.run import open_run

PRECISIONS = ("phantom", "bf16_master", "fp16_master", "fp32")
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
# The quickstart's size, and the size from docs/results/precision.md with large rounding.
MODELS = {"2 layers of 64": make_arithmetic.MODEL | EXPERTS, "24 layers of 32": DEEP | EXPERTS}
FOUND = ("beta_std", "beta_p99", "alpha_std", "k3_kl", "ess", "clipped", "phantom")


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    print(markdown(list(rows(directory))))


def rows(directory: Path) -> Iterator[dict[str, str]]:
    """Yields table lines: for every model and precision one without and one with replay."""
    for name, model in MODELS.items():
        material = directory / name.replace(" ", "-")
        write_material(material, model=model, seeds=[0])
        for precision in PRECISIONS:
            moved, *both = measured(material, precision)
            for replay, found in zip(("no", "yes"), both, strict=True):
                row = {"model": name, "precision": precision, "routed otherwise": f"{moved:.2%}"}
                yield row | {"replay": replay} | {key: f"{found[key]:.2g}" for key in FOUND}


def measured(material: Path, precision: str) -> tuple[float, dict[str, float], dict[str, float]]:
    """Measures one rollout of 64 completions.

    Returns:
      (share of tokens and layers in which learner and sampler choose different experts; split of
      the log-ratio without replay; the same with replay).
    """
    keys = {
        "precision": precision,
        "run_dir": material / precision,
        "model.path": material / "model-0",
        "data.path": material / "prompts.jsonl",
        "train.replay_routing": "true",
        "sampling.temperature": 1,
    }
    with open_run(config(CONFIGS / "phantom_clipping.toml", keys)) as (run, state, progress):
        rollouts = scoring.sampled(run, progress)
        given = scoring.minibatch(run, rollouts)
        moved = _moved(run, cast(state.policy.params, run.config.precision.compute), given)
        free = scoring.minibatch(run, [_forgotten(one) for one in rollouts])
        return moved, _split(run, state, free), _split(run, state, given)


def _forgotten(rollout: Rollout) -> Rollout:
    assert rollout.experts is not None
    return rollout._replace(experts=np.full_like(rollout.experts, -1, dtype=np.int16))


def _moved(run: Any, weights: Any, given: Minibatch) -> float:
    batch = given.batch
    inputs = (weights, batch.tokens, batch.positions, batch.segments)
    own = jax.jit(run.learning.model.hidden_routed, static_argnames="precision")(
        *inputs, precision=run.config.precision
    )
    recorded = np.asarray(batch.experts)
    other = np.any(np.sort(own.experts, axis=-1) != np.sort(recorded, axis=-1), axis=-1)
    return float(np.mean(other[(recorded >= 0).all(axis=(2, 3))]))


def _split(run: Any, state: Any, given: Minibatch) -> dict[str, float]:
    tokens = split(run.learning.learner, given, params=state.policy.params).tokens()
    low, high = run.config.probe.clip_range
    return split_log_ratio(tokens, low=low, high=high)


if __name__ == "__main__":
    main()
