"""TRL's names for what jaxrl's keys set. docs/from_trl.md shows the table; errors about unknown
keys quote it."""

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Renamed(NamedTuple):
    """Keys of a config that do what an argument of TRL does."""

    keys: tuple[str, ...]
    note: str = ""  # differences, as one clause


# Arguments of TRL 1.16 and of the trainer of transformers that its configs extend.
NAMES: Mapping[str, Renamed] = {
    # Model and data
    "model_name_or_path": Renamed(("model.path",), "a directory or a name on the hub"),
    "dataset_name": Renamed(("data.path",), "a file or a name on the hub"),
    "chat_template_kwargs": Renamed(("data.template_kwargs",)),
    "dataset_text_field": Renamed(("data.text_key",)),
    "max_prompt_length": Renamed(
        ("data.max_prompt_tokens",), "longer ones are dropped and counted"
    ),
    "max_length": Renamed(("train.row_length",), "longer ones are dropped and counted"),
    "output_dir": Renamed(("run_dir",)),
    # Batches
    "max_steps": Renamed(("train.steps",), "it counts rollout batches"),
    "num_train_epochs": Renamed(("train.steps",), "it counts rollout batches"),
    "batch_size": Renamed(("train.train_batch", "train.batch_size"), "prompts, over all devices"),
    "per_device_train_batch_size": Renamed(
        ("train.microbatch_tokens",), "tokens; it changes speed and memory, never the result"
    ),
    "gradient_accumulation_steps": Renamed(
        ("train.train_batch", "train.batch_size"),
        "set the whole batch; train.microbatch_tokens divides it",
    ),
    "generation_batch_size": Renamed(
        ("train.train_batch",), "prompts; TRL counts completions, train.group_size a prompt"
    ),
    "steps_per_generation": Renamed(("train.updates_per_rollout",)),
    "num_generations": Renamed(("train.group_size",)),
    "gradient_checkpointing": Renamed(("train.remat",)),
    # Sampling
    "max_completion_length": Renamed(("sampling.max_tokens",)),
    "max_new_tokens": Renamed(("sampling.max_tokens",)),
    "use_vllm": Renamed(("sampler.name",), 'sampler.name = "vllm" starts a server'),
    "vllm_mode": Renamed(("sampler.name",), 'sampler.name = "vllm" starts a server'),
    "vllm_server_base_url": Renamed(("sampler.url",)),
    "vllm_gpu_memory_utilization": Renamed(("sampler.vllm_args",)),
    "vllm_tensor_parallel_size": Renamed(("sampler.vllm_args",)),
    "vllm_enable_sleep_mode": Renamed(("sampler.sleep",)),
    # Rewards
    "reward_funcs": Renamed(("reward.path",)),
    "reward_weights": Renamed(("reward.weights",)),
    "mask_truncated_completions": Renamed(("train.mask_truncated",)),
    # Loss
    "loss_type": Renamed(("loss.name",), "`jaxrl losses` lists the names"),
    "beta": Renamed(("loss.kl",)),
    "epsilon": Renamed(("loss.clip_low", "loss.clip_high")),
    "epsilon_high": Renamed(("loss.clip_high",)),
    "delta": Renamed(("loss.cap",), "the bound itself"),
    "entropy_coef": Renamed(("loss.entropy",)),
    "importance_sampling_level": Renamed(("loss.name",), "`gspo` for sequences"),
    "scale_rewards": Renamed(("loss.advantage",), "`batch_relative`, `centred` and others"),
    "top_entropy_quantile": Renamed(("loss.top_entropy",), "the share that is kept"),
    "vllm_importance_sampling_mode": Renamed(
        ("loss.correction",), "with `loss.ratio` set to over_anchor"
    ),
    "center_rewards_coefficient": Renamed(("loss.center_rewards",)),
    # Optimizer and numbers
    "lr": Renamed(("optimizer.learning_rate",)),
    "optim": Renamed(("optimizer.name",)),
    "lr_scheduler_type": Renamed(("optimizer.schedule",)),
    "warmup_ratio": Renamed(("optimizer.warmup_steps",), "optimizer steps"),
    "adam_beta1": Renamed(("optimizer.betas",)),
    "adam_beta2": Renamed(("optimizer.betas",)),
    "adam_epsilon": Renamed(("optimizer.eps",)),
    "max_grad_norm": Renamed(("optimizer.clip_norm",)),
    "bf16": Renamed(("precision",), 'precision = "bf16_master"'),
    "fp16": Renamed(("precision",), 'precision = "fp16_master"'),
    "dtype": Renamed(("precision",)),
    # Adapters
    "use_peft": Renamed(("lora.rank",)),
    "lora_r": Renamed(("lora.rank",)),
    "lora_alpha": Renamed(("lora.alpha",)),
    "lora_target_modules": Renamed(("lora.targets",)),
    # The run
    "save_steps": Renamed(("checkpoint.every",)),
    "save_total_limit": Renamed(("checkpoint.keep",)),
    "load_best_model_at_end": Renamed(("checkpoint.keep_best",)),
    "eval_steps": Renamed(("eval.every",)),
    "report_to": Renamed(("tracking.wandb", "tracking.mlflow")),
    "num_completions_to_print": Renamed(("samples.every",)),
}


def rename(name: str, *, known: Collection[str], open_tables: Collection[str]) -> str | None:
    """Returns the hint for a key whose last part is an argument of TRL; None if it is not, or if
    none of jaxrl's keys for it is known."""
    leaf = name.rpartition(".")[2]
    keys, note = NAMES.get(leaf, Renamed(()))
    here = [k for k in keys if k in known or k.rpartition(".")[0] in open_tables]
    if not here:
        return None
    return f"TRL's {leaf} is {' and '.join(here)} here" + (f" ({note})" if note else "")
