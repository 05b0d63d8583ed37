"""Keys of earlier versions and what replaced each, so that the error of an old config says it."""

import dataclasses

from jaxrl.diagnostics import Limits

_TRUNCATION = "training samples from the whole distribution; only `jaxrl generate` truncates it"

REPLACED = {
    **{
        f"alarms.{limit.name}": "thresholds are constants now: LIMITS in jaxrl/config/alarms.py"
        for limit in dataclasses.fields(Limits)
    },
    "alarms.max_rollbacks": "a run rolls back twice, then the alarm pauses it",
    "alarms.zero_spread": "use alarms.zero_variance",
    "answers": "`jaxrl doctor` calls it completions",
    "arguments": "`jaxrl serve` calls it vllm_args",
    "critic.coefficient": "on a shared trunk the critic's loss has the weight 0.1",
    "data.eval_split": "write data.eval_path = 'ID:SUBSET:SPLIT'",
    "data.split": "write data.path = 'ID:SUBSET:SPLIT'",
    "data.subset": "write data.path = 'ID:SUBSET'",
    "environment.corpus": "write environment.tools = ['search:FILE']",
    "environment.weight": "scale the reward in the environment itself",
    "high": "`jaxrl doctor` has clip_range = [LOW, HIGH]",
    "hosts.heartbeat": "a silent process counts as dead after 30 seconds",
    "hosts.join": "a process waits 300 seconds for the others",
    "low": "`jaxrl doctor` has clip_range = [LOW, HIGH]",
    "mesh.rules": "an axis of size 1 is inactive; leave the other axes of [mesh] at 1",
    "probe.high": "use probe.clip_range = [LOW, HIGH]",
    "probe.low": "use probe.clip_range = [LOW, HIGH]",
    "repeat": "`jaxrl doctor` calls it timed_steps",
    "reward.kl_estimator": "the KL penalty in the reward is estimated by k1",
    "reward.model_weight": "append the weight of the reward model to reward.weights",
    "rollouts.max_seconds": "rollouts.max_staleness alone decides which groups are dropped",
    "sampler.arguments": "use sampler.vllm_args",
    "sampler.directory": "use sampler.store = 'file:///DIRECTORY'",
    "sampler.max_lora_rank": "a run starts its server with lora.rank; `jaxrl serve` has the key",
    "sampler.port": "a run starts its server on a free port; `jaxrl serve` has the key",
    "sampler.transport": "weights go through sampler.store if it is set, else shared memory",
    "samples.count": "up to four completions of two prompts are logged",
    "samples.most_tokens": "the first 512 tokens of a completion are logged",
    "sampling.min_p": _TRUNCATION,
    "sampling.top_k": _TRUNCATION,
    "sampling.top_p": _TRUNCATION,
    "strict_precision": "the log warns if learner and sampler compute in different dtypes",
    "train.refill_rounds": "use train.dynamic_sampling_rounds",
}


def replacement(key: str) -> str | None:
    """Returns the error for a key of an earlier version; None for any other key."""
    return f"{key} is not a key any more: {REPLACED[key]}" if key in REPLACED else None
