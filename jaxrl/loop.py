"""The training loop: sample -> reward -> advantage -> pack -> step -> publish.

Read `train` first: each of its lines is one stage, and each stage is a function below it. What the
stages work with (sampler, learner, data, ...) is a `Run`, which `jaxrl.run.open_run` builds.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import precision
from jaxrl.actor_critic import State
from jaxrl.advantages import Advantages, estimate, explained_variance
from jaxrl.batch import Rollout, assign_rows, gather, pack
from jaxrl.bridge.source import ParamsSource
from jaxrl.config.training import Config
from jaxrl.diagnostics.replay import parts, replay_batch, summary
from jaxrl.diagnostics.split import known_tokens, split
from jaxrl.diagnostics.variety import variety
from jaxrl.evaluate import evaluate_greedily
from jaxrl.guard import Guard, Verdict
from jaxrl.interrupt import Interrupt
from jaxrl.learner import LearnerState, Minibatch, interleave
from jaxrl.losses.algebra import Need
from jaxrl.metrics import Metrics, merge, to_floats
from jaxrl.models import huggingface, lora, peft
from jaxrl.rollouts import shaping
from jaxrl.rollouts.answers import Answers, Numbers, clock
from jaxrl.rollouts.stream import open_answers
from jaxrl.run import Progress, Run, open_run
from jaxrl.update import saved
from jaxrl.watch.plots import draw_run
from jaxrl.watch.profile import Profile
from jaxrl.watch.tracking import read_metrics
from sharding.transfer import fetch, place


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
      ResumeError, CheckpointError, ValueError: see `run.open_run`; the message says what to do.
    """
    with Interrupt() as interrupt:
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
        Profile(run.directory / "profile", steps=_traced(run)) as profile,
    ):
        guard, verdict = Guard(run), None
        if progress.step == 0:
            progress.accuracy = progress.initial_accuracy = evaluate(run, step=0)
        signum = run.hosts.largest(interrupt.signum or 0)
        while progress.step < config.train.steps and not signum and not verdict:
            seconds: Numbers = {}
            profile.before(progress.step + 1)
            with clock(seconds, "time/step"):
                answers = collect(seconds=seconds)
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
            verdict = run.hosts.led(guard.check)
            signum = run.hosts.largest(interrupt.signum or 0)
            if verdict is None or verdict.action == "pause":
                ending = signum > 0 or verdict is not None
                keep_safe(run, state, progress, ending=ending)
        done = progress.step == config.train.steps and verdict is None
        model = finish(run, state) if done else None
        accuracies = progress.initial_accuracy, progress.accuracy
        return Result(progress.step, signum or None, *accuracies, model, verdict)


class Targets(NamedTuple):
    """What is learnt from each answer: f32[C] of its tokens, or one advantage for all of them.

    Attributes:
      advantages: for the policy.
      values: what the critic expected; None without one.
      returns: what it should have expected; None without one.
    """

    advantages: Advantages
    values: Sequence[np.ndarray] | None
    returns: Sequence[np.ndarray] | None

    def of(self, part: slice) -> "Targets":
        """Those of some answers."""
        values = None if self.values is None else self.values[part]
        returns = None if self.returns is None else self.returns[part]
        return Targets(self.advantages[part], values, returns)


def learn(
    run: Run, state: State, rollouts: Sequence[Rollout], *, progress: Progress
) -> tuple[State, Numbers]:
    """One optimizer step on each mini-batch, of the critic where there is one and, once that is
    pre-trained, of the policy; the metrics are means over all of them."""
    policy, seconds = state.policy, Numbers()
    learning_rate = float(run.learning_rate(int(policy.step)))
    # Equal parts; where dynamic sampling found too few groups they are smaller, or fewer.
    size = -(-len(rollouts) // run.config.train.updates_per_rollout)
    parts = [slice(i, i + size) for i in range(0, len(rollouts), size)]
    with clock(seconds, "time/score"):
        targets, numbers = aim(run, state, rollouts, parts=parts)
        minibatches = [
            _with_scores(run, policy, _pack(run, rollouts[part], targets.of(part)))
            for part in parts
        ]
        probed, beta = probe(run, policy, minibatches[0], step=progress.step)
        jax.block_until_ready(minibatches)
    if run.samples.due(progress.step):
        some = rollouts[parts[0]]
        betas = None if beta is None else gather(beta, some, rows=_rows(run, some)[0])
        step, advantages = progress.step + 1, targets.of(parts[0]).advantages
        run.samples.write(step, some, advantages=advantages, betas=betas)
    if run.recipe.entropy is not None:
        coefficient = progress.entropy_coefficient
        coefficient = run.recipe.entropy.initial if coefficient is None else coefficient
        minibatches = [_with_entropy_weights(m, coefficient) for m in minibatches]
    collected: Metrics = {}
    with clock(seconds, "time/update"):
        for minibatch in minibatches:
            state, metrics = update(run, state, minibatch, step=progress.step)
            collected = merge(collected, metrics)
        numbers |= probed | to_floats(collected) | {"learning_rate": learning_rate}
    numbers |= seconds
    if run.recipe.entropy is not None and "entropy" in numbers:
        numbers["entropy/coefficient"] = coefficient
        progress.entropy_coefficient = run.recipe.entropy.next(
            coefficient, entropy=numbers["entropy"]
        )
    return state, numbers


def update(run: Run, state: State, minibatch: Minibatch, *, step: int) -> tuple[State, Metrics]:
    """One optimizer step."""
    if run.critic is None:
        policy, metrics = run.learner.step(state.policy, minibatch)
        return State(policy), metrics
    if step < run.config.critic.pretrain_steps:
        return run.critic.pretrain(state, minibatch)
    return run.critic.step(state, minibatch)


def aim(
    run: Run, state: State, rollouts: Sequence[Rollout], *, parts: Sequence[slice]
) -> tuple[Targets, Numbers]:
    """Advantages, and where there is a critic its values and its own targets."""
    known, numbers = shaping.outcomes(
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


def per_token(
    run: Run,
    rollouts: Sequence[Rollout],
    score: Callable[[Minibatch], jax.Array],
    *,
    parts: Sequence[slice],
) -> list[np.ndarray]:
    """What `score` finds for the tokens of each answer, f32[C]; 0 where the policy did not
    choose."""
    found: list[np.ndarray] = []
    for part in parts:
        some = rollouts[part]
        minibatch = _pack(run, some, Targets(np.zeros(len(some)), None, None))
        rows, _ = _rows(run, some)
        found += gather(fetch(score(minibatch)), some, rows=rows)
    return found


def probe(
    run: Run, state: LearnerState, minibatch: Minibatch, *, step: int
) -> tuple[Numbers, np.ndarray | None]:
    """The log-ratio of a mini-batch taken apart into policy and arithmetic, before any update:
    metrics, and beta f32[B, T], None where it is not due."""
    c, batch = run.config.probe, minibatch.batch
    if not _due(c.every, step):
        return {}, None
    arrays = fetch(
        {
            "learner": run.learner.score(state.params, minibatch),
            "shadow": run.learner.shadow(state.params, minibatch),
            "sampler": batch.sampler_logprobs,
        }
    )
    mask, segments, advantages = fetch((batch.action_mask, batch.segments, batch.advantages))
    tokens = known_tokens(**arrays, advantages=advantages, mask=mask, segments=segments)
    beta = arrays["learner"] - arrays["shadow"]
    if not tokens.learner.size:
        return {}, beta
    found = split(tokens, low=c.low, high=c.high)
    ids = fetch(batch.tokens) if c.replay else None
    if ids is not None and run.replay is not None:
        replay = replay_batch(run.replay, tokens=ids, segments=segments)
        three = parts(replay=replay[mask], **{k: v[mask] for k, v in arrays.items()})
        found |= summary(three)
    return {f"probe/{name}": value for name, value in found.items()}, beta


def _rows(run: Run, rollouts: Sequence[Rollout]) -> tuple[list[Sequence[int]], int]:
    """Which answers lie in which row of a mini-batch, and the microbatches in use."""
    c = run.config
    if c.train.packing:
        rows = assign_rows([r.length for r in rollouts], row_length=c.row_length)
    else:
        rows = [[i] for i in range(len(rollouts))]
    # Room for the worst case, one sequence to a row, so that the step compiles once.
    most = -(-c.minibatch_answers // c.microbatch_rows)
    return interleave(rows, rows_per_microbatch=c.microbatch_rows, max_microbatches=most)


def _pack(run: Run, rollouts: Sequence[Rollout], targets: Targets) -> Minibatch:
    rows, used = _rows(run, rollouts)
    batch = pack(
        rollouts,
        list(targets.advantages),
        values=targets.values,
        returns=targets.returns,
        rows=rows,
        row_length=run.config.row_length,
    )
    sharding = run.layout.batch(("batch", "length"))
    return Minibatch(batch=place(batch, sharding), microbatches=jnp.int32(used))


def _with_scores(run: Run, state: LearnerState, minibatch: Minibatch) -> Minibatch:
    """Adds the scores that the loss needs and that are known before the first update."""
    needs = run.recipe.objective.needs
    if Need.REFERENCE in needs:
        assert run.reference is not None
        reference = lora.with_trainable(state.params, run.reference)
        scores = run.learner.score(reference, minibatch)
        minibatch = dataclasses.replace(minibatch, reference=scores)
    if Need.ANCHOR in needs and run.config.train.updates_per_rollout > 1:
        minibatch = dataclasses.replace(
            minibatch, anchor=run.learner.score(state.params, minibatch)
        )
    return minibatch


def _with_entropy_weights(minibatch: Minibatch, coefficient: float) -> Minibatch:
    weights = jnp.full_like(minibatch.batch.advantages, coefficient)
    batch = dataclasses.replace(minibatch.batch, entropy_weights=weights)
    return dataclasses.replace(minibatch, batch=batch)


def evaluate(run: Run, *, step: int) -> float | None:
    """Greedy accuracy on the held-out prompts, logged; None without them."""
    return run.hosts.led(lambda: _evaluate(run, step=step))


def _evaluate(run: Run, *, step: int) -> float | None:
    if run.held_out is None:
        return None
    found = evaluate_greedily(
        run.sampler,
        run.held_out.examples,
        sampling=run.sampling,
        reward=run.rewards[0] if run.rewards else None,
        tokenizer=run.tokenizer,
        arena=run.arena,
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
        "kl": numbers.get("kl", numbers.get("mismatch/k3_kl", float("nan"))),
    }
    run.tracker.log(step, variety(answers.sampled) | numbers | own)


def keep_safe(run: Run, state: State, progress: Progress, *, ending: bool) -> None:
    """Evaluates and saves where the config says so, and saves when the run is ending."""
    c, step = run.config, progress.step
    measured = None
    if step == c.train.steps or _due(c.eval.every, step):
        measured = evaluate(run, step=step)
        progress.accuracy = measured if measured is not None else progress.accuracy
    if step == c.train.steps or _due(c.checkpoint.every, step) or ending or measured is not None:
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


def _traced(run: Run) -> tuple[int, int] | None:
    return run.config.train.profile_steps if run.hosts.leads else None


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
