"""Low-rank adapters (arXiv:2106.09685): a second pytree beside frozen parameters.

A matrix W of the layers, or of the output layer, becomes W + alpha / rank * B A. A [rank, in] and
B [out, rank] are trained, W is frozen. Where the output layer is tied to the embedding, an adapter
changes the output layer alone. The head of a reward model is new, so it is trained whole, beside
the adapters. `Adapted` can replace parameters anywhere; the functions below accept both.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct, traverse_util
from jax import lax

from jaxrl.core.buckets import count_bucket
from jaxrl.core.casts import cast
from jaxrl.core.precision import PRESETS, DType, Precision
from jaxrl.models import spec
from jaxrl.models.products import product
from jaxrl.models.spec import Params, ParamSpec, Specs

_MODULE = re.compile(r"(_proj|\.in_proj_\w+)\.weight$")  # not routers, convolutions and norms
_SCORE = "score"  # the head of a scorer
_HEAD = "head"
OUTPUT_LAYER = "lm_head"
"""PEFT's name of the output layer among `lora.targets`."""


@struct.dataclass
class Adapted:
    """Frozen parameters and trained adapters; also their specs, shapes or shardings."""

    # {"layers": {"q_a": [L, rank, in], "q_b": [L, out, rank], ...}}, by group, "head_a" [rank, in]
    # and "head_b" [out, rank]; with a scorer's head
    adapters: Any
    frozen: Any  # as the decoder declares them
    alpha: float = struct.field(pytree_node=False)

    @property
    def rank(self) -> int:
        """Rank of every adapter."""
        leaves = jax.tree.leaves_with_path(self.adapters, is_leaf=spec.is_spec)
        return next(x.shape[-2] for path, x in leaves if path[-1].key.endswith("_a"))

    @property
    def scale(self) -> float:
        """Factor of B A: alpha / rank."""
        return self.alpha / self.rank


def adapter_specs(specs: Specs, *, rank: int, targets: Sequence[str]) -> Specs:
    """Declares adapters of the matching matrices, under PEFT's names, and the head of a scorer.

    Args:
      specs: the decoder's.
      rank: rank of every adapter.
      targets: patterns of module names with * and ?, such as "q_proj", "*_proj" or "lm_head", the
        output layer. Experts cannot be adapted.

    Raises:
      ValueError: if a pattern matches no matrix; the message lists the modules.
    """
    modules = {
        path: (one, one.name.removesuffix(".weight").rpartition(".")[2])
        for path, one in spec.flatten(specs).items()
        if one.stacked == 1 and len(one.shape) == 3 and _MODULE.search(one.name)
    }
    if _SCORE not in specs:
        head = specs.get(_HEAD, specs["embed"])._replace(name=f"{OUTPUT_LAYER}.weight")
        modules[_HEAD] = head, OUTPUT_LAYER
    for target in targets:
        if not any(fnmatch.fnmatchcase(module, target) for _, module in modules.values()):
            known = ", ".join(dict.fromkeys(module for _, module in modules.values()))
            raise ValueError(f"lora.targets: {target!r} matches no module; there are {known}")
    adapters: dict[str, ParamSpec] = {}
    for path, (one, module) in modules.items():
        if not any(fnmatch.fnmatchcase(module, target) for target in targets):
            continue
        (*count, outputs, inputs), (*layers, out, into) = one.shape, one.axes
        prefix = f"base_model.model.{one.name.removesuffix('.weight')}"
        adapters[f"{path}_a"] = one._replace(
            shape=(*count, rank, inputs),
            axes=(*layers, "rank", into),
            name=f"{prefix}.lora_A.weight",
            scale=(3 * inputs) ** -0.5,  # the variance of PEFT's uniform distribution
        )
        adapters[f"{path}_b"] = one._replace(
            shape=(*count, outputs, rank),
            axes=(*layers, out, "rank"),
            name=f"{prefix}.lora_B.weight",
            scale=0.0,
        )
    if _SCORE in specs:
        adapters[_SCORE] = specs[_SCORE]._replace(name=f"base_model.model.{specs[_SCORE].name}")
    return traverse_util.unflatten_dict(adapters, sep="/")


def axes_of(name: str, specs: Mapping[str, ParamSpec]) -> tuple[str, ...]:
    """Returns the logical axes of one layer's parameter, which may be an adapter: "q_a" is beside
    "q". `specs` are those that the decoder declares for the layers."""
    if name in specs:
        return specs[name].axes[1:]
    _, outputs, inputs = specs[name[:-2]].axes
    return ("rank", inputs) if name.endswith("_a") else (outputs, "rank")


def abstract(specs: Any, *, trained: DType, kept: DType) -> Any:
    """Returns shapes and dtypes without allocating; `kept` is the dtype of frozen parameters."""
    if not isinstance(specs, Adapted):
        return spec.abstract(specs, dtype=trained)
    adapters = spec.abstract(specs.adapters, dtype=trained)
    return Adapted(adapters, spec.abstract(specs.frozen, dtype=kept), specs.alpha)


def declared(specs: Any) -> Any:
    """Merges specs into one tree of the decoder's form: adapters stand beside their matrices, and a
    trained head replaces the frozen one."""
    if not isinstance(specs, Adapted):
        return specs

    def beside(kept: Any, own: Any) -> Any:
        if type(own) is tuple:  # of layers; a ParamSpec is another kind of tuple
            return tuple(map(beside, kept, own))
        return {**kept, **own} if isinstance(own, dict) else own

    return specs.frozen | {
        name: beside(specs.frozen.get(name), own) for name, own in specs.adapters.items()
    }


def with_head(adapters: Params, base: Params) -> Params:
    """Initialises a scorer's trained head with the base's; other adapters are unchanged."""
    if _SCORE not in adapters:
        return adapters
    return adapters | {_SCORE: base[_SCORE].astype(adapters[_SCORE].dtype)}


def trainable(params: Any) -> Any:
    """Returns the part that the optimizer updates: the adapters, or all parameters."""
    return params.adapters if isinstance(params, Adapted) else params


def with_trainable(params: Any, changed: Any) -> Any:
    """Replaces the part that `trainable` returns."""
    if not isinstance(params, Adapted):
        return changed
    return Adapted(changed, params.frozen, params.alpha)


def frozen(params: Any) -> Any:
    """Returns the parameters that the decoder declares: the frozen part, or all parameters."""
    return params.frozen if isinstance(params, Adapted) else params


def attach(params: Any) -> Params:
    """Builds the decoder's input: adapters beside their matrices, with the scale folded into B."""
    if not isinstance(params, Adapted):
        return params
    return declared(Adapted(scaled(params), params.frozen, params.alpha))


def output_layer(params: Params) -> jax.Array:
    """Returns the matrix of the output layer, [V, D], without its adapter."""
    return params.get(_HEAD, params["embed"])


def head_adapter(params: Any) -> jax.Array | None:
    """Returns B of the output layer's adapter, [V, rank], with the scale folded in; None without
    one."""
    if isinstance(params, Adapted):
        params = scaled(params)
    return params.get(f"{_HEAD}_b")


def scaled(params: Adapted) -> Params:
    """Returns the adapters with the scale folded into B."""

    def one(path: tuple[Any, ...], value: jax.Array) -> jax.Array:
        if not path[-1].key.endswith("_b"):
            return value
        return (params.scale * value.astype(jnp.float32)).astype(value.dtype)

    return jax.tree.map_with_path(one, params.adapters)


def stacked(several: Sequence[Params]) -> Params:
    """Stacks S `scaled` adapters of one base behind the layers: A [L, S, R, in], B [L, S, out, R];
    those of the output layer [S, R, in] and [S, out, R].

    R is the same for all of `several`, a power of two of at least 16: smaller ranks end with zeros,
    and a matrix that one of them does not adapt has zeros. `layers.OWN` then chooses a row's own.
    """
    flat: list[Any] = [traverse_util.flatten_dict(one) for one in several]
    whole = {path: x for one in flat for path, x in one.items()}

    def ranked(path: tuple[str, ...]) -> int:
        """Returns the axis of the rank, counted from the end."""
        return -2 if path[-1].endswith("_a") else -1

    most = max((x.shape[ranked(path)] for one in flat for path, x in one.items()), default=1)
    room = count_bucket(most, multiple=16)

    def stack(path: tuple[str, ...]) -> jax.Array:
        like, axis = whole[path], whole[path].ndim + ranked(path)

        def part(x: jax.Array | None) -> jax.Array:
            if x is None:
                return jnp.zeros((*like.shape[:axis], room, *like.shape[axis + 1 :]), like.dtype)
            more = room - x.shape[axis]
            return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)])

        return jnp.stack([part(one.get(path)) for one in flat], axis=like.ndim - 2)

    return traverse_util.unflatten_dict({path: stack(path) for path in whole})


def merge(params: Any) -> Params:
    """Folds adapters into plain parameters: W + alpha / rank * B A, added in f32 and rounded to W's
    dtype. A scorer's head keeps its own dtype. Where the output layer is tied, its adapter makes a
    "head" beside the embedding."""
    return _merge(params) if isinstance(params, Adapted) else params


def merged_shardings(shardings: Any) -> Any:
    """Returns the shardings of `merge`, from those of its argument; None without any."""
    if not isinstance(shardings, Adapted) or f"{_HEAD}_a" not in shardings.adapters:
        return frozen(shardings)
    return {_HEAD: shardings.frozen["embed"], **shardings.frozen}


def as_computed(params: Any, precision: Precision) -> Any:
    """Returns the parameters that a learner computes with, see `computes_merged`."""
    return merge(params) if computes_merged(precision) else params


def computes_merged(precision: Precision) -> bool:
    """True if a learner merges adapters before each use, as the sampler does: with fixed sums,
    because adapters beside their matrices add in another order, and with weights in 8 bits, because
    they would not be rounded."""
    return precision.sums == "fixed" or precision.blocks in ("e4m3", "int8")


def as_reference(params: Any, precision: Precision) -> Any:
    """Returns the trainable part as a reference keeps it: in `compute`, and as it is where the
    learner merges, which rounds the sum alone. Its log-probs are then those of the learner with the
    same parameters, bit for bit."""
    merged = isinstance(params, Adapted) and computes_merged(precision)
    return cast(trainable(params), precision.params if merged else precision.compute)


def of_adapters(params: Any, grads: Any) -> Any:
    """Returns the gradient of the trainable part, from that of the merged
    parameters in f32."""
    if not isinstance(params, Adapted):
        return grads
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    _, pull = jax.vjp(lambda own: merge(with_trainable(wide, own)), wide.adapters)
    return pull(grads)[0]


@jax.jit
def _merge(params: Adapted) -> Params:
    def one(parts: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        weight, a, b = (part.astype(jnp.float32) for part in parts)
        change = product(b, a, contract=(1, 0), precision=PRESETS["fp32"])
        return (weight + params.scale * change).astype(parts[0].dtype)

    def group(frozen: dict[str, jax.Array], adapters: dict[str, jax.Array]) -> dict[str, jax.Array]:
        names = [key.removesuffix("_a") for key in adapters if key.endswith("_a")]
        parts = {n: (frozen[n], adapters[f"{n}_a"], adapters[f"{n}_b"]) for n in names}
        # Layer by layer: the f32 copies of a whole stack would be twice the bf16 model.
        return frozen | {name: lax.map(one, of_name) for name, of_name in parts.items()}

    a, b = (params.adapters.get(f"{_HEAD}_{part}") for part in "ab")
    changed = {
        name: group(params.frozen[name], own) if isinstance(own, dict) else own
        for name, own in params.adapters.items()
        if own is not a and own is not b
    }
    if a is not None:
        changed[_HEAD] = one((output_layer(params.frozen), a, b))
    return {**params.frozen, **changed}
