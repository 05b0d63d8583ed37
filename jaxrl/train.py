"""The training loop: sample -> reward -> advantage -> pack -> step -> publish.

Read `_train` first: its loop body is one step of a run. Then `learn`. `training.run.open_run`
builds the `Run` from the config. Prompts become scored rollouts in `training.rollouts.collect`, or
in `training.rollouts.stream` while the learner trains; rollouts become minibatches in
`training.minibatches`; `learner.update` is the optimizer step.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrl.builders.learner import Learning
from jaxrl.config.bucket import local_directory
from jaxrl.config.training import Config
from jaxrl.core import Hosts, Metrics, Minibatch, Rollout, merge, to_floats
from jaxrl.fleet.workers import fleet_numbers
from jaxrl.learner import State, applied_steps
from jaxrl.tracking.profile import Profile, explain_no_trace
from jaxrl.training.absorbed import absorbed_note
from jaxrl.training.alarm_actions import AlarmActions, Verdict
from jaxrl.training.compile_ahead import compile_ahead
from jaxrl.training.deployment_gap import deployment_gap
from jaxrl.training.evaluate import Evaluation, evaluate_greedily
from jaxrl.training.export import export
from jaxrl.training.first_step import first_step
from jaxrl.training.interrupt import Interrupt
from jaxrl.training.minibatches import (
    compute_advantages,
    prepare_minibatch,
    split_sequences,
    with_coefficients,
    with_room,
)
from jaxrl.training.mirror import mirrored
from jaxrl.training.probes import run_probes
from jaxrl.training.progress import Progress
from jaxrl.training.resume import save
from jaxrl.training.rollouts.collect import step_metrics
from jaxrl.training.rollouts.stream import open_collector
from jaxrl.training.run import Run, open_run
from jaxrl.training.run_directory import lock
from jaxrl.training.timing import Numbers, clock, is_due


class Result(NamedTuple):
    """The outcome of a run."""

    step: int  # rollout batches trained on
    signum: int | None  # the signal that ended it early, or None
    # Both held-out and greedy; None if not measured.
    initial_accuracy: float | None
    final_accuracy: float | None
    # Step and held-out accuracy of the best checkpoint; None without one.
    best: tuple[int, float] | None
    model: Path | None  # directory of the trained model; None if the run ended early
    verdict: Verdict | None = None  # on the alarm that ended it early, or None
    # Held-out completions that could not be scored, at first and last, which count as wrong.
    initial_failed: int = 0
    final_failed: int = 0
    held_out: int = 0  # held-out completions of an evaluation


@mirrored
def train(config: Config, *, fork: str | None = None) -> Result:
    """Trains for `config.train.steps` steps, or until a signal or an alarm ends the run.

    A run that was stopped or killed resumes from its last checkpoint when it is called again with
    the same config, and computes the same parameters bit for bit. A new run starts from the
    checkpoint `fork` of another, written RUN or RUN@STEP.

    Raises:
      ResumeError, CheckpointError, ValueError: as `run.open_run` and `run_directory.lock`.
    """
    with Interrupt() as interrupt, lock(local_directory(config.run_dir), Hosts()):
        while True:
            result = _train(config, interrupt, fork=fork)
            rollback = result.verdict is not None and result.verdict.action == "rollback"
            # After a signal nothing new begins: the next start carries the rollback out.
            if not rollback or result.signum is not None:
                return result


def _train(config: Config, interrupt: Interrupt, *, fork: str | None) -> Result:
    """Trains to the end or to the first rollback, which takes effect when the run is reopened."""
    with (
        open_run(config, fork=fork) as (run, state, progress),
        run.hosts.reporting(),
        compile_ahead(run.config, run.learning, state, step=progress.step) as wait_for_compiler,
        open_collector(
            run.source, progress=progress, interrupt=interrupt, hosts=run.hosts
        ) as collect,
        _open_profile(run, done=progress.step) as profile,
        first_step(
            (state, run.learning.shape, config.loss, config.precision.text),
            tracker=run.tracker,
            done=progress.step == config.train.steps,
        ) as first_step_done,
    ):
        alarms, tokenizer = AlarmActions(run), run.source.task.tokenizer
        if progress.step == 0:
            progress.initial_accuracy = evaluate(run, progress, params=state.policy.params)
            progress.initial_failed = progress.failed
        verdict, signum = None, run.hosts.largest(interrupt.signum or 0)
        while progress.step < config.train.steps and not signum and not verdict:
            seconds: Numbers = {}
            profile.before(progress.step + 1)
            with clock(seconds, "time/step"):
                rollouts = collect(seconds=seconds)  # prompts -> sample -> reward
                if rollouts is None:  # a signal came during the wait
                    signum = run.hosts.largest(interrupt.signum or 0)
                    save(run.checkpoints, state, progress=progress)
                    break
                wait_for_compiler()
                run.sleep()
                with clock(seconds, "time/learn"):
                    state, learned = learn(run, state, rollouts=rollouts.batch, progress=progress)
                with clock(seconds, "time/publish"):
                    progress.step += 1
                    published = run.publish(state.policy.params, version=progress.step)
                judged: Numbers = {}
                if run.judge is not None:
                    with clock(seconds, "time/judge"):
                        judged = run.judge.compare(progress.step, rollouts.sampled)
            measured = rollouts.numbers | learned | published | judged | seconds
            numbers = run.hosts.share(measured | fleet_numbers())
            if note := absorbed_note(numbers, run.tracker.history, precision=config.precision):
                run.tracker.note(note)
            run.tracker.log(progress.step, step_metrics(rollouts, numbers, tokenizer=tokenizer))
            first_step_done()
            accuracy = evaluate(run, progress, params=state.policy.params)
            verdict = run.hosts.on_leader(alarms.check)
            signum = run.hosts.largest(interrupt.signum or 0)
            if verdict is None or verdict.action == "pause":
                due = is_due(run.config.checkpoint.every, progress.step) or accuracy is not None
                last = progress.step == config.train.steps
                if due or last or signum > 0 or verdict is not None:
                    save(run.checkpoints, state, progress=progress, metric=accuracy)
        model = None
        if progress.step == config.train.steps and verdict is None:
            signum = 0  # one in the last step ends nothing early
            model = export(
                run.config,
                run.learning,
                source=run.models.policy,
                params=state.policy.params,
                hosts=run.hosts,
            )
        return Result(
            progress.step,
            signum or None,
            progress.initial_accuracy,
            progress.accuracy,
            run.checkpoints.best(),
            model,
            verdict,
            progress.initial_failed,
            progress.failed,
            len(run.source.task.held_out.examples) if run.source.task.held_out else 0,
        )


def _open_profile(run: Run, *, done: int) -> Profile:
    """Opens the profiler of process 0; warns if the run is past the steps to profile."""
    steps = run.config.train.profile_steps
    if (note := explain_no_trace(steps, done=done, total=run.config.train.steps)) is not None:
        run.tracker.note(note)
    directory = local_directory(run.config.run_dir) / "profile"
    return Profile(directory, steps=steps if run.hosts.leads else None)


def learn(
    run: Run, state: State, *, rollouts: Sequence[Rollout], progress: Progress
) -> tuple[State, Numbers]:
    """Rewards -> advantages -> minibatches -> one optimizer step on each."""
    updates, seconds = run.config.train.updates_per_rollout, Numbers()
    with clock(seconds, "time/score"):
        sequences = split_sequences(rollouts, updates=updates)
        rollouts, parts, _ = sequences
        run = run._replace(learning=with_room(run.learning, sequences))
        targets, numbers = compute_advantages(run, state, sequences)
        minibatches = [
            prepare_minibatch(
                run.learning,
                state.policy,
                rollouts=rollouts[part],
                targets=targets.of(part),
                updates=updates,
            )
            for part in parts
        ]
        numbers |= run_probes(
            run,
            state.policy.params,
            rollouts=rollouts[parts[0]],
            advantages=targets.of(parts[0]).advantages,
            minibatch=minibatches[0],
            step=progress.step,
        )
        jax.block_until_ready(minibatches)
    with clock(seconds, "time/update"):
        pretraining = progress.step < run.config.critic.pretrain_steps
        state, learned = update(
            run.learning,
            state,
            minibatches=minibatches,
            progress=progress,
            pretraining=pretraining,
            max_kl=run.config.train.max_kl,
        )
    for name, apart in run.learning.apart.items():
        numbers[f"{name}/bytes_sent"] = apart.taken()
    return state, numbers | learned | seconds


def update(
    learning: Learning,
    state: State,
    *,
    minibatches: Sequence[Minibatch],
    progress: Progress,
    pretraining: bool,
    max_kl: float | None = None,
) -> tuple[State, Numbers]:
    """Takes one optimizer step on each minibatch: of the policy, and of the critic if there is one.
    While `pretraining`, only the critic learns. The first step that finds the policy further than
    `max_kl` from the sampler's is the last.

    Returns:
      (the new state, metrics: means over all steps, and the learning rate of the first).
    """
    learning_rate = float(learning.learning_rate(applied_steps(state.policy)))
    controllers = learning.recipe.controllers
    coefficients = {
        name: progress.coefficients.get(name, controller.initial)
        for name, controller in controllers.items()
    }
    if coefficients:
        minibatches = [with_coefficients(m, coefficients) for m in minibatches]
    collected: Metrics = {}
    left_out = 0
    for taken, minibatch in enumerate(minibatches, start=1):
        if learning.critic is None:
            policy, metrics = learning.learner.step(state.policy, minibatch)
            state = State(policy)
        elif pretraining:
            state, metrics = learning.critic.pretrain(state, minibatch)
        else:
            state, metrics = learning.critic.step(state, minibatch)
        collected = merge(collected, metrics)
        if max_kl is not None and _divergence(metrics) > max_kl:
            left_out = len(minibatches) - taken
            break
    numbers = to_floats(collected) | {"learning_rate": learning_rate}
    if max_kl is not None:
        numbers["update/left_out"] = float(left_out)
    for name, controller in controllers.items():
        if controller.metric in numbers:
            numbers[f"{name}/coefficient"] = coefficients[name]
            measured = numbers[controller.metric]
            progress.coefficients[name] = controller.next(coefficients[name], measured=measured)
    return state, numbers


def _divergence(metrics: Metrics) -> float:
    """Reads from a step's metrics the policy's divergence from the sampler's before the step; 0 if
    it is unknown. All processes of a run read the same number."""
    name = "mismatch/k3_kl"
    return to_floats({name: metrics[name]} if name in metrics else {}).get(name, 0.0)


def evaluate(run: Run, progress: Progress, *, params: Any) -> float | None:
    """Measures and logs greedy accuracy on the held-out prompts and the deployment gap, if an
    evaluation is due: before the first step, after the last one and as `eval.every` says. `params`
    are the learner's, which the sampler serves."""
    step = progress.step
    if step not in (0, run.config.train.steps) and not is_due(run.config.eval_every, step):
        return None

    def measure() -> Evaluation | None:
        return None if run.source.task.held_out is None else evaluate_greedily(run.source)

    found = run.hosts.on_leader(measure)
    if found is None:
        return None
    numbers = {"accuracy": found.accuracy, "failed": float(found.failed)}
    numbers |= {"completions": float(found.rewards.size)} | found.numbers
    numbers |= deployment_gap(run, params, rollouts=found.rollouts)
    run.tracker.log(step, {f"eval/{name}": value for name, value in numbers.items()})
    held_out = run.source.task.held_out
    if run.samples is not None and held_out is not None and run.config.samples.every:
        run.samples.write_held_out(
            step, found.rollouts, rewards=found.rewards[:, 0].tolist(), examples=held_out.examples
        )
    if found.failure is not None:
        run.tracker.note(f"step {step}, held-out prompts: {found.failure}")
    if step == 0 and found.no_share is not None:
        run.tracker.note(f"held-out prompts: {found.no_share}")
    progress.accuracy, progress.failed = found.accuracy, found.failed
    return progress.accuracy
