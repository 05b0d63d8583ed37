"""The embedded sampler's decode step, lowered from shapes alone, for planning."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.core.precision import Precision
from jaxrl.models.model import Model
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.embedded.decode_steps import (
    SEGMENT,
    DecodeState,
    RowPlan,
    decode_segment,
    draw_first,
)
from jaxrl.sampling.embedded.draw_token import DrawSettings, draw_settings
from jaxrl.sampling.embedded.kv_cache import prefill
from jaxrl.sampling.embedded.stopping import no_ending
from jaxrl.sampling.embedded.unstacked import unstack_shapes, wants_unstacked
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.transfer import placed


class DecodeProgram(NamedTuple):
    """A program that decodes up to `tokens` tokens per row."""

    lowered: jax.stages.Lowered
    tokens: int


def decode_program(
    model: Model,
    params: Any,
    *,
    rows: int,
    slots: int,
    sampling: SamplingParams,
    precision: Precision | str,
    layout: Layout,
    record_experts: bool = False,
) -> DecodeProgram:
    """Lowers the decode step of a batch, without allocating anything.

    Args:
      model: the sampler's model.
      params: shapes with shardings, in the sampler's dtypes.
      rows: completions decoded together, over all devices.
      slots: capacity of a row in tokens.
      sampling: sampling settings; tokens that truncation keeps are recorded.
      precision: the sampler's, see `sampler_precision`.
      layout: placement on the sampler's devices.
      record_experts: true to return the experts of each token.
    """
    precision = Precision.of(precision)
    if wants_unstacked(layout.mesh.devices.flat[0], model.config):
        params = unstack_shapes(params, model.config)
    settings = draw_settings(sampling, record_kept=True)
    options: Any = {"model": model, "precision": precision, "record_experts": record_experts}
    state = _state(params, settings, (rows, slots), **options)
    state = placed(state, _shardings(state, layout))
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=layout.replicated)
    lowered = decode_segment.lower(
        params,
        state,
        most=number,
        floor=number,
        settings=settings,
        model=model,
        precision=precision,
    )
    return DecodeProgram(lowered, SEGMENT)


def _state(
    params: Any, settings: DrawSettings, shape: tuple[int, int], **options: Any
) -> DecodeState:
    """Returns the shapes of a batch with its cache."""

    def begin(params, tokens, lengths, key):
        rows = jnp.zeros_like(lengths)
        ending = jax.tree.map(jnp.asarray, no_ending(shape[0], settings.stops))
        plan = RowPlan(rows, jnp.stack([rows, rows], axis=1), rows, ending)
        held, logits = prefill.__wrapped__(params, tokens, lengths, for_cpu=False, **options)
        states, _ = draw_first.__wrapped__(logits, lengths, plan=plan, key=key, settings=settings)
        return DecodeState(held, states)

    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    lengths = jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(begin, params, tokens, lengths, key)


def _shardings(state: DecodeState, layout: Layout) -> DecodeState:
    """Returns the shardings of a batch that the sampler's programs give it: rows over the batch
    axes, the cache's heads over the head axes."""
    rows, heads = (layout.batch(axes).spec for axes in (("batch",), ("batch", "kv_heads")))

    def of_cache(path: Any, x: Any) -> NamedSharding:
        # The narrow keys of latent attention are one head.
        parted = path[0].name in ("keys", "values") and x.shape[2] > 1
        return NamedSharding(layout.mesh, PartitionSpec(None, *(heads if parted else rows)))

    cache = jax.tree_util.tree_map_with_path(of_cache, state.cache)
    return DecodeState(cache, jax.tree.map(lambda _: layout.batch(("batch",)), state.rows))
