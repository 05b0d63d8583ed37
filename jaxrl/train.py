"""The training loop: sample -> reward -> advantage -> pack -> step -> publish.

Read `_train` first, whose loop is a step of the run, and then `learn`. Prompts become completions
with rewards in `jaxrl.training.rollouts.answers`, or in `stream` while the learner trains; they
become mini-batches in `jaxrl.training.minibatches`. `jaxrl.training.run.open_run` builds the `Run`
that holds the sampler, the learner, the data and the rest.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxrl.advantages import estimate, explained_variance
from jaxrl.bridge.source import ParamsSource
from jaxrl.config.training import Config
from jaxrl.core import precision
from jaxrl.core.batch import Minibatch, Rollout
from jaxrl.core.hosts import Hosts
from jaxrl.core.metrics import Metrics, merge, to_floats
from jaxrl.learner.actor_critic import State
from jaxrl.learner.update import saved, taken
from jaxrl.models import huggingface, lora, peft
from jaxrl.monitoring.completion_metrics import completion_metrics
from jaxrl.monitoring.tracking.plots import draw_run
from jaxrl.monitoring.tracking.profile import Profile, explain_no_trace
from jaxrl.monitoring.tracking.tracking import read_metrics
from jaxrl.training.alarm_actions import Guard, Verdict
from jaxrl.training.evaluate import evaluate_greedily
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.minibatches import Targets, divide, per_token, prepare, with_entropy_weights
from jaxrl.training.probe import observe
from jaxrl.training.rollouts import outcomes
from jaxrl.training.rollouts.answers import Answers, Numbers, clock
from jaxrl.training.rollouts.stream import open_answers
from jaxrl.training.run import Progress, Run, open_run
from jaxrl.training.storage.run_directory import held
from sharding.transfer import fetch


class Result(NamedTuple):
    """How a run ended.

    Attributes:
      step: rollouts trained on.
      signum: the signal that ended it early, or None.
      initial_accuracy, final_accuracy: held-out and greedy; None if not measured.
      model: directory of the trained model; None if the run was ended early.
      verdict: on the alarm that ended it early, or None.
    """

    step: int
    signum: int | None
    initial_accuracy: float | None
    final_accuracy: float | None
    model: Path | None
    verdict: Verdict | None = None


def train(config: Config) -> Result:
    """Trains until `config.train.steps` rollouts are learnt, a signal comes, or an alarm ends it.

    A run that was ended, or killed, goes on from its last checkpoint when it is called again with
    the same config, and computes what it would have computed, bit for bit.

    Raises:
      ResumeError, CheckpointError, ValueError: see `run.open_run` and `run_directory.held`; the
        message says what to do.
    """
    with Interrupt() as interrupt, held(Path(config.run_dir), Hosts()):
        while (result := _train(config, interrupt)).verdict is not None:
            # After a signal nothing is begun any more: the next start carries it out.
            if result.verdict.action != "rollback" or result.signum is not None:
                break
        return result


def _train(config: Config, interrupt: Interrupt) -> Result:
    """As `train`, up to the first rollback, which is carried out when the run is opened again."""
    with (
        open_run(config) as (run, state, progress),
        run.hosts.reporting(),
        open_answers(run, progress, interrupt) as collect,
        Profile(run.directory / "profile", steps=_traced(run, progress)) as profile,
    ):
        guard, verdict = Guard(run), None
        if progress.step == 0:
            progress.initial_accuracy = evaluate(run, progress)
        signum = run.hosts.largest(interrupt.signum or 0)
        while progress.step < config.train.steps and not signum and not verdict:
            seconds: Numbers = {}
            profile.before(progress.step + 1)
            with clock(seconds, "time/step"):
                answers = collect(seconds=seconds)  # prompts -> sample -> reward
                if answers is None:  # a signal came while it waited
                    signum = run.hosts.largest(interrupt.signum or 0)
                    save(run, state, progress)
                    break
                with clock(seconds, "time/learn"):
                    state, learnt = learn(run, state, answers.batch, progress=progress)
                with clock(seconds, "time/publish"):
                    progress.step += 1
                    published = run.publish(state.policy.params, version=progress.step)
            numbers = run.hosts.share(answers.numbers | learnt | published | seconds)
            log(run, answers, step=progress.step, numbers=numbers)
            measured = evaluate(run, progress)
            verdict = run.hosts.led(guard.check)
            signum = run.hosts.largest(interrupt.signum or 0)
            if verdict is None or verdict.action == "pause":
                ending = signum > 0 or verdict is not None
                keep_safe(run, state, progress, measured=measured, ending=ending)
        done = progress.step == config.train.steps and verdict is None
        model = finish(run, state) if done else None
        accuracies = progress.initial_accuracy, progress.accuracy
        return Result(progress.step, signum or None, *accuracies, model, verdict)


def learn(
    run: Run, state: State, rollouts: Sequence[Rollout], *, progress: Progress
) -> tuple[State, Numbers]:
    """Rewards -> advantages -> mini-batches -> an optimizer step on each."""
    parts, seconds = divide(run, rollouts), Numbers()
    with clock(seconds, "time/score"):
        targets, numbers = aim(run, state, rollouts, parts=parts)
        minibatches = [
            prepare(run, state.policy, rollouts[part], targets.of(part)) for part in parts
        ]
        first = rollouts[parts[0]], targets.of(parts[0]).advantages, minibatches[0]
        numbers |= observe(run, state.policy, *first, step=progress.step)
        jax.block_until_ready(minibatches)
    with clock(seconds, "time/update"):
        state, learnt = update(run, state, minibatches, progress=progress)
    return state, numbers | learnt | seconds


def aim(
    run: Run, state: State, rollouts: Sequence[Rollout], *, parts: Sequence[slice]
) -> tuple[Targets, Numbers]:
    """Advantages, and where there is a critic its values and its own targets."""
    known, numbers = outcomes.outcomes(
        run,
        rollouts,
        params=state.policy.params,
        logprobs=lambda params: per_token(
            run, rollouts, functools.partial(run.learner.score, params), parts=parts
        ),
    )
    if run.critic is None or run.recipe.critic is None:
        return Targets(estimate(run.recipe.advantages, known), None, None), numbers
    judge = functools.partial(run.critic.values, state)
    values = per_token(run, rollouts, judge, parts=parts)
    known = dataclasses.replace(known, values=values)
    returns = run.recipe.critic.returns(known)
    numbers["value/explained_variance"] = explained_variance(returns, known)
    return Targets(estimate(run.recipe.advantages, known), values, returns), numbers


def update(
    run: Run, state: State, minibatches: Sequence[Minibatch], *, progress: Progress
) -> tuple[State, Numbers]:
    """One optimizer step on each mini-batch, of the critic where there is one and, once that is
    pre-trained, of the policy; the metrics are means over all of them, and the learning rate is
    that of the first."""
    learning_rate = float(run.learning_rate(taken(state.policy)))
    entropy, coefficient = run.recipe.entropy, progress.entropy_coefficient
    if entropy is not None:
        coefficient = entropy.initial if coefficient is None else coefficient
        minibatches = [with_entropy_weights(m, coefficient) for m in minibatches]
    collected: Metrics = {}
    for minibatch in minibatches:
        state, metrics = _step(run, state, minibatch, step=progress.step)
        collected = merge(collected, metrics)
    numbers = to_floats(collected) | {"learning_rate": learning_rate}
    if entropy is not None and coefficient is not None and "entropy" in numbers:
        numbers["entropy/coefficient"] = coefficient
        progress.entropy_coefficient = entropy.next(coefficient, entropy=numbers["entropy"])
    return state, numbers


def _step(run: Run, state: State, minibatch: Minibatch, *, step: int) -> tuple[State, Metrics]:
    if run.critic is None:
        policy, metrics = run.learner.step(state.policy, minibatch)
        return State(policy), metrics
    if step < run.config.critic.pretrain_steps:
        return run.critic.pretrain(state, minibatch)
    return run.critic.step(state, minibatch)


def evaluate(run: Run, progress: Progress) -> float | None:
    """Greedy accuracy on the held-out prompts, logged, before the first step, after the last one
    and where the config says so; None at other steps, and without such prompts."""
    step = progress.step
    if step not in (0, run.config.train.steps) and not _due(run.config.eval.every, step):
        return None
    measured = run.hosts.led(lambda: _evaluate(run, step=step))
    progress.accuracy = measured if measured is not None else progress.accuracy
    return measured


def _evaluate(run: Run, *, step: int) -> float | None:
    if run.held_out is None:
        return None
    found = evaluate_greedily(
        run.sampler,
        run.held_out.examples,
        sampling=run.sampling,
        reward=run.rewards[0] if run.rewards else None,
        tokenizer=run.tokenizer,
        episode_runner=run.episode_runner,
    )
    numbers = {f"eval/{name}": value for name, value in found.numbers.items()}
    run.tracker.log(step, {"eval/accuracy": found.accuracy} | numbers)
    return found.accuracy


def log(run: Run, answers: Answers, *, step: int, numbers: Numbers) -> None:
    """Writes the metrics of a step: those given and what the answers show."""
    lengths = np.array([len(r.completion) for r in answers.sampled])
    tokens = sum(r.length for r in answers.batch)
    own = {
        "completion_length": float(lengths.mean()),
        "completion_length/max": float(lengths.max()),
        "completion/truncated": float(np.mean([r.truncated for r in answers.sampled])),
        "tokens_per_second": tokens / numbers["time/step"],
        "tokens_per_second/sample": float(lengths.sum()) / max(numbers["time/sample"], 1e-9),
        "tokens_per_second/learn": tokens / numbers["time/learn"],
        # Without a reference model: the divergence from the policy that was sampled.
        "kl": numbers.get("kl/reference", numbers.get("mismatch/k3_kl", float("nan"))),
    }
    run.tracker.log(step, completion_metrics(answers.sampled) | numbers | own)


def keep_safe(
    run: Run, state: State, progress: Progress, *, measured: float | None, ending: bool
) -> None:
    """Saves where the config says so, what was evaluated, and when the run is ending."""
    ending |= progress.step == run.config.train.steps
    if ending or measured is not None or _due(run.config.checkpoint.every, progress.step):
        save(run, state, progress, metric=measured)


def save(run: Run, state: State, progress: Progress, *, metric: float | None = None) -> None:
    """Saves a step that has not been saved."""
    if progress.step > (run.checkpoints.latest_step() or 0):
        host, critic = progress.to_json(), state.critic
        run.checkpoints.save(
            progress.step, saved(state.policy), host=host, critic=critic, metric=metric
        )


def finish(run: Run, state: State) -> Path:
    """Exports the trained model for Hugging Face, as it was sampled, and draws the curves; adapters
    are merged into it, and kept by themselves besides."""
    model, source, params = run.directory / "model", run.config.model.path, state.policy.params
    policy = precision.parse(run.config.precision)
    tensors = ParamsSource(lora.merge(params), run.model.specs, dtype=policy.exported)
    adapters = fetch(params.adapters) if isinstance(params, lora.Adapted) else None

    def write(tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        huggingface.save_tensors(
            model, tensors, run.model.config, dtype=policy.exported, source_dir=source
        )
        if adapters is not None:
            adapter = run.directory / "adapter"
            peft.save(adapter, adapters, specs=run.specs, base=source, dtype=policy.params)
        draw_run(read_metrics(run.directory / "metrics.jsonl"), run.directory / "curves.png")

    run.hosts.consumed(tensors, write)
    return run.hosts.share(model)  # nobody leaves before it is written


def _traced(run: Run, progress: Progress) -> tuple[int, int] | None:
    steps, total = run.config.train.profile_steps, run.config.train.steps
    if (note := explain_no_trace(steps, done=progress.step, total=total)) is not None:
        run.tracker.note(note)
    return steps if run.hosts.leads else None


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
