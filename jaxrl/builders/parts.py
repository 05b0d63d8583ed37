"""What commands build from sections of a config: devices, model, optimizer, prompts, sampling."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import optax
from flax import traverse_util

from jaxrl import losses
from jaxrl.advantages import compares_group, reads_components
from jaxrl.config.lora import LoraConfig
from jaxrl.config.mesh import MeshConfig
from jaxrl.config.tables import (
    DataConfig,
    OptimizerConfig,
    PromptConfig,
    SamplerConfig,
    SamplingConfig,
)
from jaxrl.config.training import Config
from jaxrl.core import precision
from jaxrl.core.precision import DType, Precision
from jaxrl.data import prompts
from jaxrl.data.prompts import Prompts, Rendering, Tokenizer
from jaxrl.environments.tools.schema import Tool
from jaxrl.learner import optimizers
from jaxrl.learner import policy as learner
from jaxrl.learner.policy import Learner
from jaxrl.losses import Need, Objective, Recipe
from jaxrl.models import huggingface, kernels, lora, peft, spec
from jaxrl.models.decoder import Model, decoder
from jaxrl.models.families import DecoderConfig
from jaxrl.models.kernels import Wanted
from jaxrl.models.spec import Params, Specs
from jaxrl.sampling.base import SamplingParams
from sharding.mesh import make_mesh
from sharding.partition import Layout
from sharding.rules import PRESETS
from sharding.transfer import place

NO_TOOLS: Mapping[str, Tool] = MappingProxyType({})
_HOST = "pinned_host"  # jax's name of memory that devices copy from by themselves


class Optimizer(NamedTuple):
    """An optimizer and the learning rate that it uses at each of its steps."""

    transformation: optax.GradientTransformation
    learning_rate: optax.Schedule


def make_layout(mesh: MeshConfig, *, devices: Sequence[Any] | None = None) -> Layout:
    """Devices, arranged.

    Args:
      mesh: sizes and rules.
      devices: all of them are used; by default all there are, or one if the sizes are 1.

    Raises:
      ValueError: if the sizes do not multiply to the number of devices, or a rule does not fit.
    """
    if devices is None:
        alone = math.prod(mesh.sizes.values()) == 1 and jax.process_count() == 1
        devices = jax.devices()[:1] if alone else jax.devices()
    return Layout(make_mesh(**mesh.sizes, devices=devices), mesh.layout_rules)


def sampler_layout(config: SamplerConfig, layout: Layout) -> Layout:
    """How the embedded sampler's weights and answers lie on the learner's devices."""
    return layout if config.rules is None else Layout(layout.mesh, PRESETS[config.rules])


def make_decoder(
    config: DecoderConfig, *, layout: Layout, remat: str, attention: Wanted = "auto"
) -> Model:
    """A decoder that computes on the layout's devices."""
    return decoder(
        config,
        remat=remat,
        constrain=layout.constrain,
        local=layout.local,
        attend=kernels.attend(attention, layout=layout, config=config),
    )


def attention_note(
    wanted: Wanted, *, config: DecoderConfig, layout: Layout, policy: Precision, length: int
) -> str:
    """What a run says of its attention in rows of `length` tokens.

    Raises:
      ValueError: as `kernels.choose`.
    """
    kernel = kernels.choose(wanted, layout=layout, config=config, precision=policy, length=length)
    first = layout.mesh.devices.flat[0]
    return f"attention by {kernel} on {layout.mesh.size} x {first.device_kind}"


def load_model(
    path: str,
    *,
    layout: Layout,
    dtype: DType,
    remat: str = "none",
    attention: Wanted = "auto",
) -> tuple[Model, Params]:
    """A language model's checkpoint, its parameters cut over the devices as the layout says.

    Raises:
      FileNotFoundError, ValueError: as `huggingface.load`; also for a reward model.
    """
    config = huggingface.load_config(path)
    if config.scored:
        raise ValueError(
            f"{path} is a reward model, which has no words to say; a language model is needed here"
        )
    model = make_decoder(config, layout=layout, remat=remat, attention=attention)
    return model, _load(model, path, load=huggingface.load, layout=layout, dtype=dtype)


def load_scorer(
    path: str,
    *,
    layout: Layout,
    dtype: DType,
    remat: str = "none",
    attention: Wanted = "auto",
) -> tuple[Model, Params]:
    """As `load_model`, a reward model, or the beginning of one from a language model.

    Raises:
      FileNotFoundError, ValueError: as `huggingface.load_scorer`.
    """
    config = dataclasses.replace(huggingface.load_config(path), scored=True)
    model = make_decoder(config, layout=layout, remat=remat, attention=attention)
    return model, _load(model, path, load=huggingface.load_scorer, layout=layout, dtype=dtype)


def _load(
    model: Model,
    path: str,
    *,
    load: Callable[..., tuple[DecoderConfig, Params]],
    layout: Layout,
    dtype: DType,
) -> Params:
    shardings: dict[str, Any] = traverse_util.flatten_dict(  # pyright: ignore[reportAssignmentType]
        layout.tree(model.specs), sep="/"
    )
    _, params = load(path, dtype=dtype, put=lambda name, array: place(array, shardings[name]))
    return params


def trained_specs(config: LoraConfig, specs: Specs) -> Any:
    """Of what a run holds: the model's, or `lora.Adapted`.

    Raises:
      ValueError: if a target of the adapters matches nothing.
    """
    if not config.rank:
        return specs
    adapters = lora.adapter_specs(specs, rank=config.rank, targets=config.targets)
    return lora.Adapted(adapters, specs, config.alpha)


def load_trained(config: Config, *, layout: Layout) -> tuple[Model, Any, Any]:
    """The model of a run, what is trained and its specs: all parameters in `precision.params`, or
    adapters beside parameters that stay in `precision.wire`.

    Raises:
      FileNotFoundError, ValueError: as `load_model`, `trained_specs` and `peft.load`.
    """
    c, policy = config.lora, precision.parse(config.precision)
    dtype = policy.wire if c.rank else policy.params
    model, params = load_model(
        config.model.path,
        layout=layout,
        dtype=dtype,
        remat=config.train.remat,
        attention=config.train.attention,
    )
    specs = trained_specs(c, model.specs)
    if not isinstance(specs, lora.Adapted):
        return model, params, specs
    if c.path is not None:
        adapters = peft.load(c.path, specs, dtype=policy.params)
    else:
        adapters = spec.init(specs.adapters, jax.random.key(config.seed), dtype=policy.params)
    adapters = place(adapters, layout.tree(specs.adapters))
    return model, lora.Adapted(adapters, params, specs.alpha), specs


def as_published(config: LoraConfig) -> Callable[[Any], Any]:
    """The function from a run's parameters to those that samplers compute with."""
    return lora.merge if config.publish == "merged" else lambda params: params


def make_optimizer(config: OptimizerConfig, *, total_steps: int, specs: Specs) -> Optimizer:
    """The optimizer of a run of `total_steps` optimizer steps."""
    schedule = optimizers.make_schedule(
        config.schedule,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        total_steps=total_steps,
    )
    transformation = optimizers.make_optimizer(
        config.name,
        schedule,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        specs=specs,
    )
    return Optimizer(transformation, schedule)


def make_recipe(config: Config) -> Recipe:
    """The algorithm of a training run.

    Raises:
      ValueError: as `losses.build`, for one answer to each prompt where the advantage compares
        answers to one prompt, for a penalty that the advantage would not see, and for a policy's
        loss that reads values.
    """
    recipe = losses.build(
        config.loss.name,
        config.loss.parameters,
        advantage=config.loss.advantage,
        known={"max_length": config.sampling.max_tokens},
    )
    if config.train.group_size == 1 and compares_group(recipe.advantages):
        raise ValueError(
            "train.group_size = 1: the advantage compares the answers of a group, and there is "
            "only one; set train.group_size to 2 or more, or choose another loss.advantage"
        )
    if config.reward.kl and reads_components(recipe.advantages):
        raise ValueError(
            f"reward.kl = {config.reward.kl:g}: the advantage reads the components of the reward, "
            "and this is none of them, so it would change nothing; use loss.kl"
        )
    if Need.VALUES in recipe.objective.needs:
        raise ValueError(
            f"loss.name = {config.loss.name!r}: the policy's loss reads a critic's values, which "
            "are there for the critic's own loss; return a Recipe with critic=Critic(...)"
        )
    return recipe


def state_shardings(
    config: OptimizerConfig,
    init: Callable[[Any], Any],
    params: Any,
    *,
    layout: Layout,
    specs: Specs,
) -> Any:
    """Where the state that `init(params)` returns lies between steps, in the same tree.

    Args:
      config: whether moments are in the host's memory.
      init: of a learner.
      params: arrays, or their shapes.
      layout: of the parameters.
      specs: theirs.

    Raises:
      ValueError: if devices that cannot reach the host's memory are to keep moments there.
    """
    state = jax.eval_shape(init, params)
    shardings = layout.state(state, specs)
    if not config.offload:
        return shardings
    devices = list(layout.mesh.devices.flat)
    own = [d for d in devices if d.process_index == jax.process_index()]
    device = [*own, *devices][0]  # of another process it is not known
    kinds = [memory.kind for memory in device.addressable_memories()]
    if _HOST not in kinds:
        raise ValueError(
            f"optimizer.offload = true: {device.device_kind} has the memories {', '.join(kinds)}, "
            f"and {_HOST} is wanted"
        )
    moments = jax.tree.map(
        lambda x, sharding: sharding.with_memory_kind(_HOST) if x.ndim else sharding,
        state.opt_state,
        shardings.opt_state,
    )
    return dataclasses.replace(shardings, opt_state=moments)


def make_learner(
    config: Config, model: Model, *, objective: Objective, optimizer: Optimizer, layout: Layout
) -> Learner:
    """The learner of a training run, not compiled.

    Raises:
      ValueError: if a dense model is to replay the routing of experts.
    """
    if config.train.replay_routing and model.config.experts is None:
        raise ValueError(
            f"train.replay_routing = true: {config.model.path} ({model.config.model_type}) is "
            "dense, there is no routing to replay; leave it out"
        )
    specs = trained_specs(config.lora, model.specs)
    return learner.make_learner(
        model,
        objective,
        optimizer=optimizer.transformation,
        precision=precision.parse(config.precision),
        rows_per_microbatch=config.microbatch_rows,
        temperature=config.sampling.temperature,
        param_shardings=layout.tree(specs) if layout.mesh.size > 1 else None,
        as_published=as_published(config.lora),
    )


def rendering(config: PromptConfig) -> Rendering:
    """How the config wants prompts to become text."""
    return Rendering(config.template, config.system_prompt, config.prompt_format)


def load_training_prompts(
    config: DataConfig, tokenizer: Tokenizer, *, tools: Mapping[str, Tool] = NO_TOOLS
) -> Prompts:
    """The prompts under `data.path`, rendered with the tools; raises as `data.load_prompts`."""
    return _load_prompts(
        config, tokenizer, tools=tools, path=config.path, split=config.split, limit=None
    )


def load_held_out_prompts(
    config: DataConfig, tokenizer: Tokenizer, *, tools: Mapping[str, Tool] = NO_TOOLS
) -> Prompts | None:
    """Likewise those under `data.eval_path`, None if there is none."""
    if config.eval_path is None:
        return None
    return _load_prompts(
        config,
        tokenizer,
        tools=tools,
        path=config.eval_path,
        split=config.eval_split,
        limit=config.eval_limit,
    )


def _load_prompts(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    tools: Mapping[str, Tool],
    path: str,
    split: str,
    limit: int | None,
) -> Prompts:
    return prompts.load_prompts(
        prompts.read_rows(path, split=split, subset=config.subset),
        tokenizer,
        prompt_key=config.prompt_key,
        answer_key=config.answer_key,
        rendering=rendering(config)._replace(tools=tuple(t.schema for t in tools.values())),
        max_tokens=config.max_prompt_tokens,
        limit=limit,
    )


def sampling_params(
    config: SamplingConfig, model_path: str, tokenizer: Tokenizer, *, seed: int
) -> SamplingParams:
    """How answers are drawn; they end at the end-of-sequence tokens of the model and of the
    tokenizer, and at the texts of `sampling.stop`."""
    ends = sorted({*huggingface.load_end_ids(model_path), tokenizer.eos_token_id} - {None})
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in config.stop]
    return SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        stop=(*((int(end),) for end in ends), *(tuple(text) for text in texts)),
        seed=seed,
    )
