"""Attention on a mesh, with the kernels available on its devices.

`xla` is `blocks.attention`, which runs everywhere. `splash` is flash attention for TPUs: jaxrl's
kernels, or for longer rows those of jax.experimental.pallas. `cudnn` is NVIDIA's, see `cudnn`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.core.compiled import jit
from jaxrl.core.precision import Precision
from jaxrl.core.runs import bound_runs
from jaxrl.models.attention import cudnn, splash
from jaxrl.models.attention.blocks import Attend, Part, attention
from jaxrl.models.attention.scores import Scoring
from jaxrl.models.attention.visible import Tree
from jaxrl.models.families import DecoderConfig
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout

Kernel = Literal["xla", "splash", "cudnn"]
"""An implementation of attention."""
Wanted = Kernel | Literal["auto"]
"""A kernel, or the one that `choose_kernel` finds."""

_AGREEMENT = 0.05  # largest relative norm of the difference of two kernels in 16 bits


def choose_kernel(
    wanted: Wanted,
    *,
    layout: Layout,
    config: DecoderConfig,
    precision: Precision | str,
    length: int,
) -> Kernel:
    """Chooses the kernel for rows of `length` tokens on the layout's devices.

    Raises:
      ValueError: if the kernel asked for does not support this; the message gives the reason.
    """
    if wanted == "xla":
        return "xla"
    precision = Precision.of(precision)
    device = layout.mesh.devices.flat[0]
    # Kernels run inside shard_map and see only the queries of their own device.
    own = length // layout.count("length")
    reasons: dict[Kernel, str | None] = {
        "splash": _no_splash(device, config, precision, own),
        "cudnn": _no_cudnn(device, config, precision),
    }
    if precision.sums == "fixed":
        reasons = dict.fromkeys(reasons, "adds in its own order, which sums=fixed does not allow")
    if wanted == "auto":
        there: list[Kernel] = [name for name, reason in reasons.items() if reason is None]
        return (*there, "xla")[0]
    if (reason := reasons[wanted]) is not None:
        raise ValueError(f"train.attention = {wanted!r} {reason}; use 'auto' or 'xla'")
    return wanted


def _no_splash(device: Any, config: DecoderConfig, precision: Precision, own: int) -> str | None:
    if device.platform != "tpu":
        return f"is for TPUs, but the devices are of the platform {device.platform!r}"
    if own % splash.LANES:
        return f"needs a multiple of {splash.LANES} tokens, but a device has {own} of a row"
    if config.latent is not None and precision.latent == "absorbed":
        return "does not support the absorbed form of latent attention, with one head of keys"
    if precision.compute == jnp.float16:
        return "does not support f16, which the TPU's vector unit lacks"
    if precision.compute == jnp.float32:
        return "computes products of f32 in one pass of bf16"
    return None


def _no_cudnn(device: Any, config: DecoderConfig, precision: Precision) -> str | None:
    if device.platform not in ("gpu", "cuda"):
        return f"is for NVIDIA GPUs, but the devices are of the platform {device.platform!r}"
    if precision.compute.itemsize != 2:
        return f"computes in bf16 or f16, but precision.compute is {precision.compute.name}"
    if config.score_cap is not None:
        return "does not support soft caps of scores"
    if config.sinks:
        return "does not support attention sinks"
    if config.latent is not None:
        return "does not support values of another size than keys"
    limit = cudnn.head_dim_limit(device.compute_capability)
    if config.head_dim % 8 or config.head_dim > limit:
        return (
            f"needs a head_dim that is a multiple of 8 and at most {limit} on this GPU, not "
            f"{config.head_dim}"
        )
    return None


def attend_by(wanted: Wanted, *, layout: Layout, config: DecoderConfig) -> Attend:
    """Builds attention for a decoder on the layout's mesh; the kernel is chosen at each call. The
    result raises as `choose_kernel` and `by_kernel`."""
    return _Chosen(wanted, layout, config)


class _Chosen(NamedTuple):
    wanted: Wanted
    layout: Layout
    config: DecoderConfig

    def kernel(self, segments: jax.Array | Tree, length: int, precision: Precision) -> Kernel:
        """Chooses the kernel for rows of `length` tokens."""
        kernel = choose_kernel(
            self.wanted, layout=self.layout, config=self.config, precision=precision, length=length
        )
        # Packing followed the kernel of the learner's dtypes, not of these.
        unshared = isinstance(segments, Tree) and unshared_reason(kernel) is not None
        return "xla" if unshared else kernel

    def __call__(self, q, k, v, segments, *, scoring, precision, runs=None):
        on_mesh = by_kernel(self.kernel(segments, q.shape[1], precision), layout=self.layout)
        return on_mesh(q, k, v, segments, scoring=scoring, precision=precision, runs=runs)


def rounds_scaled_keys(
    attend: Attend, segments: jax.Array | Tree, length: int, precision: Precision
) -> bool:
    """Tells if attention multiplies keys by the factor of the scores and rounds them: splash."""
    chosen = isinstance(attend, _Chosen)
    return chosen and attend.kernel(segments, length, precision) == "splash"


def reserves_by_run(kernel: Kernel, layout: Layout) -> bool:
    """Tells if a kernel reserves memory for each sequence of a row: cuDNN's packed form, which GPUs
    have since Hopper."""
    return kernel == "cudnn" and cudnn.is_hopper(layout.mesh.devices.flat[0].compute_capability)


def unshared_reason(kernel: Kernel) -> str | None:
    """Explains why a kernel cannot compute rows whose sequences share prefixes; None if it can."""
    if kernel == "splash":
        return "splash compares one segment per token, and a shared token has several"
    return None


def verify_kernel(
    kernel: Kernel, *, layout: Layout, config: DecoderConfig, precision: Precision | str
) -> None:
    """Compares a kernel with `attention` on one device of this process: output and gradients, for a
    row of three sequences and padding, and for a row whose second sequence shares a prefix.

    Raises:
      RuntimeError: if they differ by more than rounding explains.
    """
    if kernel == "xla":
        return
    precision = Precision.of(precision)
    device = next(d for d in layout.mesh.devices.flat if d.process_index == jax.process_index())
    # One device suffices: machines may differ in the kernel, but not in the cut of rows.
    alone = Layout(make_mesh(devices=[device]), layout.rules)
    of_kernel, windows = by_kernel(kernel, layout=alone), {kind.window for kind in config.kinds}
    norm, worst = jnp.linalg.norm, 0.0
    kinds_of_rows = _rows()[: 1 if unshared_reason(kernel) else 2]
    for rows, window in itertools.product(kinds_of_rows, windows):
        found, expected = (
            _example(attend, config, rows, device=device, window=window, precision=precision)
            for attend in (of_kernel, attention)
        )
        differences = (float(norm(a - b) / norm(b)) for a, b in zip(found, expected, strict=True))
        worst = max(worst, *differences)
    # Not `>=`: NaN is a disagreement, too.
    if not worst < _AGREEMENT:
        raise RuntimeError(
            f"attention by {kernel} differs from XLA's by {worst:.2g} on this device, "
            f"{device.device_kind}; set train.attention = 'xla' and report it, with the versions "
            "of jax and of the driver"
        )


def _rows() -> tuple[jax.Array, Tree]:
    """Makes up a row: its segments, and its tree if the second sequence shares the first 100 tokens
    of the first one."""
    lengths = [200, 150, 100, 62]
    places = np.concatenate([np.arange(200), np.arange(100, 250), np.arange(100), np.zeros(62)])
    until = np.repeat([350, 200, 350, 450, 0], [100, 100, *lengths[1:]])
    # Padding sees itself alone.
    until[450:] = np.arange(451, 513)
    arrays = (np.repeat([1, 2, 3, 0], lengths), until, places)
    segments, *tree = (jnp.asarray(x[None], jnp.int32) for x in arrays)
    return segments, Tree(*tree)


def _example(
    attend: Attend,
    config: DecoderConfig,
    rows: jax.Array | Tree,
    *,
    device: Any,
    window: int | None,
    precision: Precision,
) -> tuple[jax.Array, ...]:
    """Runs attention over real tokens of a made-up row; returns output and gradients in f32."""
    rng, groups = np.random.default_rng(0), config.num_heads // config.num_kv_heads
    # One key head with its query heads: the kernels treat all heads alike.
    shapes = ((groups, config.head_dim), (1, config.head_dim), (1, config.value_dim))
    inputs = [rng.normal(size=(1, 512, *shape)).astype(precision.activations) for shape in shapes]
    sinks = jnp.asarray(rng.normal(size=groups), jnp.float32) if config.sinks else None

    def run(q, k, v):
        scoring = Scoring(window, config.score_scale, config.score_cap, sinks)
        runs = None if isinstance(rows, Tree) else bound_runs(np.asarray(rows))
        out = attend(q, k, v, rows, scoring=scoring, precision=precision, runs=runs)
        # Kernels may write anything at padding.
        real = (_rows()[0] > 0)[:, :, None, None]
        return jnp.where(real, out, 0).astype(jnp.float32)

    def both(q, k, v):
        out, backward = jax.vjp(run, q, k, v)
        return out, *(x.astype(jnp.float32) for x in backward(jnp.sin(out)))

    return jit(both)(*jax.device_put(inputs, device))


def by_kernel(kernel: Kernel, *, layout: Layout, interpret: bool = False) -> Attend:
    """Builds attention with a kernel, without checking that the devices support it.

    Rows and heads are sharded as the rules say. Where the rules cut "length", devices exchange
    tokens for heads, so that each has whole rows of some heads (arXiv:2309.14509). If there are too
    few heads of keys, every device keeps its part of the queries and gathers the keys and values of
    the whole rows. In rows that share prefixes, each device skips the blocks that its own rows do
    not see.

    The result raises ValueError if rows, tokens or heads do not divide over their devices, or if
    rows share prefixes and the kernel cannot compute them (`unshared_reason`). `interpret` runs
    splash attention's program without a TPU, slowly.
    """
    over = layout.axes("length")
    by_heads = layout.whole_rows("q_heads", "kv_heads")

    def on_mesh(q, k, v, segments, *, scoring, precision, runs=None):
        shared = isinstance(segments, Tree)
        if shared and (reason := unshared_reason(kernel)) is not None:
            raise ValueError(f"rows share prefixes, but {reason}; pack them without")
        if over and k.shape[2] % by_heads.count("kv_heads") == 0:
            move = functools.partial(_exchange, layout, by_heads)
            q, k, v = move(q, "q_heads"), move(k, "kv_heads"), move(v, "kv_heads")
            own = by_kernel(kernel, layout=by_heads, interpret=interpret)
            out = own(q, k, v, segments, scoring=scoring, precision=precision, runs=runs)
            return _exchange(by_heads, layout, out, "q_heads")
        whole = kernel == "xla" and not over
        if whole and (not shared or k.shape[2] % layout.count("kv_heads")):
            # XLA shards it over rows and heads itself.
            return attention(q, k, v, segments, scoring=scoring, precision=precision)
        local = functools.partial(_LOCAL[kernel], precision=precision)
        if kernel == "cudnn":
            local = functools.partial(local, packed=reserves_by_run(kernel, layout), runs=runs)
        constant = None
        if kernel == "splash":
            local = functools.partial(local, interpret=interpret)
            constant = splash.build(q, v, layout, scoring=scoring, interpret=interpret)
        return _on_mesh(local, layout, q, k, v, _Given(segments, scoring, None, constant))

    return on_mesh


def _exchange(source: Layout, target: Layout, x: jax.Array, heads: str) -> jax.Array:
    """Moves [B, T, H, hd] between a layout that cuts tokens and one that cuts these heads instead:
    each device sends a part of what it has to each other one of its row."""
    before, after = (one.batch(("batch", "length", heads)).spec for one in (source, target))
    over = source.axes("length")
    split, joined = (2, 1) if over else (1, 2)
    move = functools.partial(
        jax.lax.all_to_all,
        axis_name=over or target.axes("length"),
        split_axis=split,
        concat_axis=joined,
        tiled=True,
    )
    on_devices: Any = jax.shard_map(
        move, mesh=source.mesh, in_specs=before, out_specs=after, check_vma=False
    )
    return on_devices(x)


class _Given(NamedTuple):
    """A kernel's arguments besides queries, keys and values."""

    segments: jax.Array | Tree  # see `attention`
    scoring: Scoring
    part: Part | None
    constant: Any  # splash attention's compiled mask


def _on_mesh(local, layout, q, k, v, given: _Given):
    """Runs `local(q, k, v, given)` on each device's own part."""
    tokens = ("batch", "length")
    q = layout.constrain(q, (*tokens, "q_heads", "head_dim"))
    k, v = (layout.constrain(x, (*tokens, "kv_heads", "head_dim")) for x in (k, v))
    if layout.mesh.size == 1:
        return local(q, k, v, given)
    queries, keys, rows = (
        layout.batch(axes).spec for axes in ((*tokens, "q_heads"), (*tokens, "kv_heads"), tokens)
    )
    over = layout.axes("length")

    def one(q, k, v, given):
        # Queries stay where they are; keys and values are gathered. With grouped-query attention
        # they are the smaller part.
        if over:
            gather = functools.partial(jax.lax.all_gather, axis_name=over, axis=1, tiled=True)
            first = jax.lax.axis_index(over) * q.shape[1]
            rows = jax.tree.map(gather, given.segments)
            given = given._replace(part=Part(first.astype(jnp.int32), rows))
            k, v = gather(k), gather(v)
        return local(q, k, v, given)

    whole: Any = PartitionSpec()
    scoring = jax.tree.map(lambda _: whole, given.scoring)
    if given.scoring.sinks is not None:
        scoring = dataclasses.replace(scoring, sinks=layout.batch(("q_heads",)).spec)
    split = whole
    if given.constant is not None:
        split = given.constant.manual_sharding_spec(
            NamedSharding(layout.mesh, PartitionSpec(None, over or None))
        )
    return jax.shard_map(
        one,
        mesh=layout.mesh,
        in_specs=(queries, keys, keys, _Given(rows, scoring, whole, split)),
        out_specs=queries,
        # The kernels do not declare over which mesh axes their results vary.
        check_vma=False,
    )(q, k, v, given)


def _xla(q, k, v, given: _Given, *, precision):
    segments, scoring, part, _ = given
    return attention(q, k, v, segments, scoring=scoring, precision=precision, part=part)


def _splash(q, k, v, given: _Given, *, precision, interpret):
    segments, scoring, part, kernel = given
    assert not isinstance(segments, Tree)
    settings: Any = {"scoring": scoring, "part": part, "precision": precision}
    return splash.attend(kernel, q, k, v, segments, interpret=interpret, **settings)


def _cudnn(q, k, v, given: _Given, *, precision, packed, runs):
    segments, scoring, part, _ = given
    settings: Any = {"scoring": scoring, "precision": precision}
    # The packed form takes whole sequences: it knows neither parts of rows nor shared tokens.
    if packed and part is None and not isinstance(segments, Tree):
        return cudnn.packed(q, k, v, segments, runs=runs, **settings)
    return cudnn.masked(q, k, v, segments, part=part, **settings)


_LOCAL: dict[Kernel, Callable[..., jax.Array]] = {"xla": _xla, "splash": _splash, "cudnn": _cudnn}
