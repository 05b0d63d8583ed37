"""Models made from other people's Flax NNX modules."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models.model import Model
from jaxrl.models.spec import Params, ParamSpec


class NnxConfig(NamedTuple):
    """The sizes of a model that jaxrl reads."""

    vocab_size: int  # rows of the unembedding
    max_positions: int  # tokens of the longest sequence
    experts: None = None
    logit_cap: None = None


def from_nnx(
    module: nnx.Module,
    hidden: Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array],
    *,
    unembedding: Callable[[Any], jax.Array],
    max_positions: int,
) -> tuple[Model, Params]:
    """Makes a model from an NNX module: its `nnx.Param`s are the parameters, its own code computes.

    The learner trains it with any loss and precision. `EmbeddedSampler` samples from it with a
    forward pass over the whole row for each token. jaxrl casts parameters and the result; the
    module's own casts stay. On a mesh, every parameter is cut along its largest dimension, the axis
    "embed" of the rules. Prompts shared by completions, LoRA by name and export to Hugging Face's
    format need jaxrl's own decoder.

    Args:
      module: holds the parameters. Its other state, such as dropout's counters, never changes.
      hidden: (module, tokens, positions, mask) -> hidden states [B, T, D], the module without its
        head. Tokens and positions (within the sequence) are i32[B, T]. The mask is bool[B, T, T],
        True where a query (second axis) may attend to a key: causal, and within the sequence.
      unembedding: module -> [V, D], such as the embedding if it is tied.
      max_positions: the longest sequence that the module takes.

    Returns:
      The model, and its parameters as nested dicts.

    Example:
      >>> module = nnx.Embed(512, 8, rngs=nnx.Rngs(0))  # the shortest language model
      >>> model, params = from_nnx(
      ...     module,
      ...     lambda m, tokens, positions, mask: m(tokens),
      ...     unembedding=lambda m: m.embedding[...],
      ...     max_positions=64,
      ... )
      >>> model.config.vocab_size, params["embedding"].shape
      (512, (512, 8))
    """
    graph, state, rest = nnx.split(module, nnx.Param, ...)
    params: Params = nnx.to_pure_dict(state)

    def bound(params: Params) -> Any:
        filled = jax.tree.map(lambda x: x, state)  # a copy: the original keeps its arrays
        nnx.replace_by_pure_dict(filled, params)
        return nnx.merge(graph, filled, rest)

    def run(params, tokens, positions, segments, *, precision, seen_until=None, runs=None):
        del runs  # the mask says more
        if seen_until is not None:
            raise ValueError(
                "rows in which completions share their prompt need jaxrl's own decoder; pack the "
                "completions of an NNX module with their prompts"
            )
        order = jnp.arange(tokens.shape[1])
        causal = (order[:, None] >= order[None, :])[None]
        same = segments[:, :, None] == segments[:, None, :]
        return hidden(bound(params), tokens, positions, causal & same).astype(precision.activations)

    def head(params: Params) -> jax.Array:
        return unembedding(bound(params))

    vocab_size = jax.eval_shape(head, params).shape[0]
    specs = jax.tree.map_with_path(_declare, params)
    config: Any = NnxConfig(vocab_size, max_positions)
    return Model(config, specs, run, head), params


def _declare(path: tuple[Any, ...], parameter: jax.Array) -> ParamSpec:
    """Declares a parameter; only its largest dimension may be cut."""
    largest = max(range(parameter.ndim), key=lambda axis: parameter.shape[axis], default=0)
    axes = tuple("embed" if axis == largest else "norm" for axis in range(parameter.ndim))
    return ParamSpec(parameter.shape, axes, jax.tree_util.keystr(path), None)
