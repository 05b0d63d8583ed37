"""Measures beta between two programs that round alike and add in another order, for dtype policies.

python scripts/two_programs.py [MODEL [PROMPTS]]

MODEL is a directory; without it, Result 1's random model (24 layers). PROMPTS is a .jsonl file.
The embedded sampler in bf16 completes 16 prompts four times. Each policy scores the tokens twice:
with the model's weights, and with hidden sizes and inner sizes in a random order, which is the same
function with its sums in another order. So differ two engines that follow one policy. The table has
the standard deviation of the difference, its p99, the share of tokens that would be clipped at .2,
and the standard deviation of the policy's learner against the sampler in bf16.
"""

import argparse
import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import make_arithmetic
import numpy as np
from reproduce.phantom import DEEP

from jaxrl.commands.doctor.measure import load_inputs, sample
from jaxrl.config import toml_file
from jaxrl.config.doctor import DoctorConfig
from jaxrl.core import Precision, jit
from jaxrl.learner import make_score
from jaxrl.models import Specs, flatten


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed(Precision):
    """bf16_master in which some modules hand on f32; products of wide ones take three passes."""

    wide: frozenset[str]

    def rounded(self, x: jax.Array, module: str) -> jax.Array:
        """Rounds to bf16 what no wide module hands on."""
        x = x if module in self.wide else x.astype("bfloat16")
        return x.astype(self.activations)

    def inside(self, module: str) -> Precision:
        """Returns the policy of attention and of the head."""
        return Precision.of("fp32,products=bf16x3" if module in self.wide else "bf16_master")


def mixed(*wide: str) -> Mixed:
    roles = Precision.parse("bf16_master,activations=f32")
    given = {f.name: getattr(roles, f.name) for f in dataclasses.fields(roles) if f.init}
    return Mixed(**given, wide=frozenset(wide))


HANDED_ON = ("embedding", "stream", "norms", "products", "cache")
POLICIES: Mapping[str, Precision] = {
    "bf16_master": Precision.parse("bf16_master"),
    "bf16_master,logits=bf16": Precision.parse("bf16_master,logits=bf16"),
    "bf16_master, residual stream in f32": mixed("embedding", "stream"),
    "bf16_master, norms in f32": mixed("norms"),
    "bf16_master, head in bf16x3": mixed("norms", "head"),
    "bf16_master, KV cache and attention in f32, bf16x3": mixed("cache", "softmax"),
    "bf16_master,activations=f32": Precision.parse("bf16_master,activations=f32"),
    "the same, attention and head in bf16x3": mixed(*HANDED_ON, "softmax", "head"),
    "fp16_master": Precision.parse("fp16_master"),
    "fp32,products=bf16x3": Precision.parse("fp32,products=bf16x3"),
    "fp32": Precision.parse("fp32"),
}


def reordered(params: Mapping[str, Any], specs: Specs, *, seed: int) -> Any:
    """Puts the hidden size and the inner sizes of all weights into a random order, the same in each
    weight."""
    rng, orders, axes = np.random.default_rng(seed), {}, flatten(specs)

    def one(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        for place, axis in enumerate(axes["/".join(key.key for key in path)].axes):
            if path[-1].key in ("q_norm", "k_norm") or axis not in ("embed", "norm", "mlp"):
                continue
            order = orders.setdefault(axis == "mlp", rng.permutation(x.shape[place]))
            x = jax.numpy.take(x, order, axis=place)
        return x

    return jax.tree_util.tree_map_with_path(one, params)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="directory of a model")
    parser.add_argument("prompts", nargs="?", help="a .jsonl file")
    given = parser.parse_args()
    model = given.model
    with tempfile.TemporaryDirectory() as directory:
        if model is None:
            model = Path(directory, "model")
            make_arithmetic.write_model(model, dict(DEEP), seed=0)
        keys = {"model.path": model, "sampling.max_tokens": 64, "out": directory}
        if given.prompts is not None:
            keys["data.path"] = given.prompts
        texts = [(name, str(value)) for name, value in keys.items()]
        inputs = load_inputs(toml_file.load(DoctorConfig, overrides=texts))
        sampled = sample(inputs, Precision.parse("bf16_master"), note=lambda text: None)
    batch, other = sampled.minibatch, reordered(inputs.params, inputs.model.specs, seed=0)
    mask = np.asarray(batch.batch.action_mask)
    recorded = np.asarray(batch.batch.sampler_logprobs)[mask]
    print(f"{mask.sum()} tokens, {-recorded.mean():.2g} nats each\n")
    print("| policy of both | std | p99 | clipped at .2 | std against the bf16 sampler |")
    print("| --- | --- | --- | --- | --- |")
    for name, precision in POLICIES.items():
        score = jit(make_score(inputs.model, precision=precision))
        both = (score(weights, batch) for weights in (inputs.params, other))
        ours, theirs = (np.asarray(scored, np.float64)[mask] for scored in both)
        beta = ours - theirs
        clipped = np.mean([beta > np.log(1.2), beta < np.log(0.8)])  # half the advantages each
        p99 = np.quantile(np.abs(beta), 0.99)
        cells = f"{beta.std():.1e} | {p99:.1e} | {100 * clipped:.2f} %"
        print(f"| {name} | {cells} | {(ours - recorded).std():.1e} |", flush=True)


if __name__ == "__main__":
    main()
