"""Loads models from the checkpoint that a config names."""

import functools
from typing import Any, Literal, NamedTuple

import jax
from flax import traverse_util

from jaxrl import huggingface, models
from jaxrl.builders.same_files import check_same_files
from jaxrl.config.adapters import AdaptersConfig
from jaxrl.config.supervised import SupervisedConfig
from jaxrl.config.training import Config
from jaxrl.core import DType, Hosts, Precision, short_name
from jaxrl.huggingface import Checkpoint
from jaxrl.models import DecoderConfig, Kernel, Model, Params, Specs, Wanted, decoder, lora
from jaxrl.sharding import Layout, place

Output = Literal["tokens", "scores"]


class ModelFiles(NamedTuple):
    """The checkpoints that a run starts from; equal paths share one, so files are read once."""

    policy: Checkpoint
    # The reward model or the teacher; None without one, or for one on a server.
    scorer: Checkpoint | None
    critic: Checkpoint  # of a separate critic


def find_models(config: Config) -> ModelFiles:
    """Returns the checkpoints that a config names, without reading them."""
    policy, scorer = find_trained(config), None
    known = {config.model.path: policy}

    def opened(path: str) -> Checkpoint:
        return known.setdefault(path, Checkpoint(path))

    if config.reward.model is not None and not config.reward.model_url:
        scorer = opened(config.reward.model)
    return ModelFiles(policy, scorer, opened(config.critic.path or config.model.path))


def find_trained(config: Config | SupervisedConfig) -> Checkpoint:
    """Returns the checkpoint that the trained language model starts from, without reading it. An
    adapter of the output layer unties it from the embedding."""
    return Checkpoint(config.model.path, untied=config.lora.adapts_head)


def make_decoder(
    config: DecoderConfig, *, layout: Layout, remat: str, attention: Wanted = "auto"
) -> Model:
    """Builds a decoder for the layout's devices."""
    return decoder(
        config,
        remat=remat,
        layout=layout,
        attend=models.attend_by(attention, layout=layout, config=config),
    )


def choose_kernel(
    config: Config | SupervisedConfig, sizes: DecoderConfig, *, layout: Layout
) -> Kernel:
    """Chooses the attention kernel for the rows of a run; raises as `models.choose_kernel`."""
    return models.choose_kernel(
        config.train.attention,
        layout=layout,
        config=sizes,
        precision=config.precision,
        length=config.row_length,
    )


def attention_note(config: Config | SupervisedConfig, model: Model, *, layout: Layout) -> str:
    """Chooses the attention kernel, tries it on a device, and describes devices and kernel for the
    log; raises as `models.choose_kernel` and `models.verify_kernel`."""
    kernel = choose_kernel(config, model.config, layout=layout)
    models.verify_kernel(kernel, layout=layout, config=model.config, precision=config.precision)
    first = layout.mesh.devices.flat[0]
    note = f"{layout.mesh.size} x {first.device_kind}, attention by {kernel}"
    cost = tpu_cost(config.precision) if first.platform == "tpu" else None
    return f"{note}; {cost}" if cost else note


def tpu_cost(precision: Precision) -> str | None:
    """Says what products of f16 or f32 cost on a TPU, whose units multiply bf16 alone, and where a
    cheaper precision is found; None for policies of one pass."""
    if (passes := precision.bf16_passes) <= 1:
        return None
    cost = f"each product of {short_name(precision.compute)} is {passes} of bf16"
    if precision.compute == "float16":
        cost += " (2.5 to 3.0 times the cycles), and splash takes no f16"
    return f"{cost}; see jaxrl doctor MODEL --budget .01 --topology v5p:1x1x1"


def load_model(
    checkpoint: Checkpoint,
    *,
    layout: Layout,
    dtype: DType,
    remat: str = "none",
    attention: Wanted = "auto",
    output: Output = "tokens",
) -> tuple[Model, Params]:
    """Loads a checkpoint, its parameters sharded by the layout.

    With `output` "tokens" it is a language model; with "scores" a reward model or a critic, which
    may start from a language model. Raises as `huggingface.load` and `check_same_files`, and
    ValueError for a reward model that should output tokens.
    """
    config, scored = checkpoint.config, output == "scores"
    if scored:
        config = checkpoint.scorer_config
    elif config.scored:
        raise ValueError(
            f"{checkpoint.directory} is a reward model; a causal language model is required"
        )
    check_same_files("models", checkpoint.directory, checkpoint.fingerprint, Hosts())
    model = make_decoder(config, layout=layout, remat=remat, attention=attention)
    shardings: dict[str, Any] = traverse_util.flatten_dict(layout.tree(model.specs), sep="/")
    params = checkpoint.load(
        dtype=dtype, put=lambda name, array: place(array, shardings[name]), scored=scored
    )
    return model, params


def check_precision(key: str, precision: Precision, sizes: DecoderConfig) -> None:
    """Checks that a model can be computed with a run's dtype policy.

    Raises:
      ValueError: if it cannot; the message names `key`, which has the policy.
    """
    try:
        models.check_form(precision, sizes)
        sizes.check_blocks(precision.blocks)
    except ValueError as error:
        raise ValueError(f"{key} = {precision.text!r}: {error}") from None


def check_token_ids(reader: Checkpoint, policy: Checkpoint, *, key: str) -> None:
    """Checks that a model reads token ids as the policy writes them; `key` is the key of the config
    that names the model, with its value.

    Raises:
      ValueError: if its tokenizer is not the policy's, or it lacks an embedding of a token; the
        message names the first difference.
    """
    ours, theirs = (one.tokenizer.get_vocab() for one in (policy, reader))
    differing = sorted(t for t in {**ours, **theirs} if ours.get(t) != theirs.get(t))
    if differing:
        token = differing[0]
        raise ValueError(
            f"{key} reads the policy's token ids, but its tokenizer is not the "
            f"policy's: {len(differing)} tokens differ, such as {token!r} with the id "
            f"{theirs.get(token)} there and {ours.get(token)} here; give a model with the policy's "
            "tokenizer, such as one trained from it"
        )
    highest, size = max(ours.values()), reader.config.vocab_size
    if highest >= size:
        raise ValueError(
            f"{key} has {size} embeddings, but the policy's tokenizer has the "
            f"token id {highest}; give a model trained from this policy"
        )


def trained_specs(config: AdaptersConfig, specs: Specs) -> Any:
    """Returns the specs of the learner's parameters: the model's, or `lora.Adapted`.

    Raises:
      ValueError: if one of lora.targets matches nothing.
    """
    if not config.rank:
        return specs
    adapters = lora.adapter_specs(specs, rank=config.rank, targets=config.targets)
    return lora.Adapted(adapters, specs, config.alpha)


def load_trained(
    config: Config | SupervisedConfig,
    checkpoint: Checkpoint,
    *,
    layout: Layout,
    output: Output = "tokens",
) -> tuple[Model, Any, Any]:
    """Loads the model of a run; returns it with the learner's parameters and their specs.

    Trained parameters are in `precision.params`: all of them, or with lora the adapters and the
    head of a scorer. Frozen parameters are in `precision.wire`. Raises as `check_precision`,
    `load_model`, `trained_specs`, `check_same_files` and `load_adapter`.
    """
    check_precision("precision", config.precision, checkpoint.config)
    c, precision = config.lora, config.precision
    dtype = precision.wire if c.rank else precision.params
    model, params = load_model(
        checkpoint,
        layout=layout,
        dtype=dtype,
        remat=config.train.remat,
        attention=config.train.attention,
        output=output,
    )
    specs = trained_specs(c, model.specs)
    if not isinstance(specs, lora.Adapted):
        return model, params, specs
    if c.path is not None:
        files = functools.partial(huggingface.adapter_fingerprint, c.path)
        check_same_files("adapters", c.path, files, Hosts())
        adapters = huggingface.load_adapter(c.path, specs, dtype=precision.params)
    else:
        adapters = models.init(specs.adapters, jax.random.key(config.seed), dtype=precision.params)
        adapters = lora.with_head(adapters, params)
    adapters = place(adapters, layout.tree(specs.adapters))
    return model, lora.Adapted(adapters, params, specs.alpha), specs
