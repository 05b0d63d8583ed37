"""Episodes of several sequences: each token is trained once, with its episode's advantage."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxrl.advantages import Outcomes, estimate, gae, group_relative, reinforce_pp
from jaxrl.core.batch import Rollout, chains, given_rollout
from jaxrl.core.packing import MinibatchShape, pack_minibatch
from jaxrl.environments.episodes.base import EpisodeError, EpisodeLimits, Step
from jaxrl.environments.episodes.episode import EpisodeBuilder, environment_reward
from jaxrl.learner.minibatches import minibatch
from jaxrl.learner.policy import make_learner
from jaxrl.losses import dapo
from jaxrl.sampling.base import Completion, TurnCache
from jaxrl.training.minibatches import split_sequences
from tests import tiny

LIMITS = EpisodeLimits(max_turns=9, max_tokens=30, max_prompt_tokens=9, timeout=1.0, vocab_size=64)
# The turn before each turn, and the number of its tokens.
TREES = {
    "one": ([-1, 0, 1], 3),
    "two ends after a shared turn": ([-1, 0, 0], 3),
    "a tree": ([-1, 0, 1, 0, 3, 1], 2),
    "two roots": ([-1, -1, 0, 1], 4),
}


def episode(tree: list[int], size: int, *, seed: int = 0) -> tuple[Rollout, list[Any]]:
    """The rollout of a tree of random turns with rewards 1, 2, ..., and (context, completion)."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(2, 64, 4).astype(np.int32)
    builder, turns = EpisodeBuilder(prompt, (0, 0)), list[Any]()
    for number, after in enumerate([*tree[1:], None]):
        context = builder.next_turn(LIMITS, TurnCache()).context
        tokens = rng.integers(2, 64, size).astype(np.int32)
        logprobs = rng.normal(-4, 0.1, size).astype(np.float32)
        versions = np.full(size, number, np.int32)
        done = Completion(0, 0, tokens, logprobs, versions, "stop")
        assert builder.add_completion(done).tolist() == tokens.tolist()
        turns.append((context, done))
        seen = rng.integers(2, 64, 4 if after == -1 else 2).astype(np.int32)
        step = Step(seen, reward=number + 1.0, done=after is None, after=after)
        end = builder.add_step(step, LIMITS)
    assert end == "done"
    return builder.build("done", group=seed // 2), turns


@pytest.mark.parametrize("name", TREES)
def test_loss_is_the_sum_over_turns_in_their_contexts(name):
    """The gradient over an episode's sequences equals that of its turns, each alone after what the
    policy had read."""
    rollout, turns = episode(*TREES[name])
    parts = chains(rollout._replace(reward=1.0))
    assert environment_reward(rollout) == sum(range(1, len(turns) + 1))
    alone = [
        given_rollout(context, done.tokens)._replace(logprobs=done.logprobs)
        for context, done in turns
    ]
    assert sum(part.action_mask.sum() for part in parts) == sum(len(d.tokens) for _, d in turns)
    shape = MinibatchShape(row_length=96, rows_per_microbatch=1)
    learner = make_learner(tiny.model(), dapo().objective, optimizer=optax.sgd(1.0))
    step, found = jax.jit(learner.step), []
    for some in (parts, alone):
        batch = pack_minibatch(some, [0.7] * len(some), shape=shape)
        state, metrics = step(learner.init(tiny.params()), batch)
        found.append((state.params, metrics))
    before = tiny.params()
    (one, _), (other, _) = found
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), one, before)
    assert max(jax.tree.leaves(moved)) > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), one, other)


def test_advantages_are_those_of_whole_episodes():
    """Two episodes of a group: one of three sequences, one of one. The extra sequences change no
    statistic."""
    branched, _ = episode(*TREES["a tree"])
    plain, _ = episode(*TREES["one"], seed=1)
    rollouts = [branched._replace(reward=1.0), plain._replace(reward=0.0)]
    given = split_sequences(rollouts, updates=2)
    assert given.episodes is not None
    assert given.episodes.tolist() == [0, 0, 0, 1]
    assert given.parts == [slice(0, 3), slice(3, 4)]
    masks = [one.action_mask for one in given.rollouts]
    shared: dict[str, Any] = {"groups": np.zeros(4, int), "action_masks": masks}
    outcomes = Outcomes(rewards=np.array([0.0, 0, 1, 0]), episodes=given.episodes, **shared)
    whole = group_relative(np.array([1.0, 0.0]), np.zeros(2, int))
    np.testing.assert_array_equal(estimate(group_relative, outcomes), whole[[0, 0, 0, 1]])
    # Token by token: the tokens of an episode one after the other.
    joined = Outcomes(
        rewards=np.array([1.0, 0.0]),
        groups=np.zeros(2, int),
        action_masks=[np.concatenate(masks[:3]), masks[3]],
    )
    parts = np.concatenate([*estimate(reinforce_pp, outcomes)])
    np.testing.assert_array_equal(parts, np.concatenate([*estimate(reinforce_pp, joined)]))


def test_a_critics_values_follow_the_sequences_of_an_episode():
    rollout, _ = episode(*TREES["two roots"])
    parts = chains(rollout)
    masks = [one.action_mask for one in parts]
    values = [np.linspace(i, i + 1, len(mask)) for i, mask in enumerate(masks)]
    outcomes = Outcomes(
        rewards=np.array([0.0, 2.0]),
        groups=np.zeros(2, int),
        action_masks=masks,
        values=values,
        episodes=np.zeros(2, int),
    )

    def estimator(outcomes: Outcomes) -> Any:
        given = zip(
            outcomes.token_rewards(), outcomes.values or (), outcomes.action_masks, strict=True
        )
        return [gae(r, v, m, gamma=1.0, lam=1.0)[0] for r, v, m in given]

    found = estimate(estimator, outcomes)
    # With gamma = lam = 1: the reward of the episode less the value before each token.
    for one, value, mask in zip(found, values, masks, strict=True):
        np.testing.assert_allclose(np.asarray(one)[mask], 2.0 - value[mask], atol=1e-5)


def test_a_minibatch_holds_all_sequences_of_its_rollouts():
    branched, _ = episode(*TREES["a tree"])
    plain, _ = episode(*TREES["one"], seed=1)
    rollouts = [branched._replace(reward=1.0), plain._replace(reward=0.0)]
    batch = minibatch(rollouts, group_relative).batch
    found = np.asarray(batch.advantages)[np.asarray(batch.action_mask)]
    turns = [2 * len(TREES["a tree"][0]), 3 * len(TREES["one"][0])]  # actions of each episode
    whole = group_relative(np.array([1.0, 0.0]), np.zeros(2, int))
    assert sorted(found) == sorted(np.repeat(whole, turns))


def test_a_minibatch_knows_the_turns_of_its_rollouts():
    """A token gets the rewards from its turn on: of 1, 2 and 3, and of 0, 2 and 3."""
    one, other = (episode(*TREES["one"], seed=seed)[0] for seed in (0, 1))
    assert other.episode is not None
    (begin, end, _), *later = other.episode.turns
    turns = ((begin, end, 0.0), *later)
    other = other._replace(episode=other.episode._replace(turns=turns), reward=5.0)
    batch = minibatch([one._replace(reward=6.0), other], reinforce_pp).batch
    found = np.asarray(batch.advantages)[np.asarray(batch.action_mask)]
    returns = np.repeat([6.0, 5.0, 3.0, 5.0, 5.0, 3.0], 3)
    expected = (returns - returns.mean()) / returns.std(ddof=1)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("name", TREES)
def test_no_reward_of_a_turn_is_lost(name):
    """A turn that another sequence trains is no action of the last one, which has all rewards."""
    rollout, _ = episode(*TREES[name])
    parts, total = chains(rollout), environment_reward(rollout)
    outcomes = Outcomes(
        rewards=np.array([0.0] * (len(parts) - 1) + [total]),
        groups=np.zeros(len(parts), int),
        action_masks=[one.action_mask for one in parts],
        turns=[one.episode.turns for one in parts if one.episode],
        episodes=np.zeros(len(parts), int),
    )

    def earned(whole: Outcomes) -> Any:
        (mask,), (rewards,) = whole.action_masks, whole.token_rewards()
        return np.array([rewards[mask].sum()])

    np.testing.assert_allclose(estimate(earned, outcomes), total)


def test_a_masked_episode_masks_its_branches():
    rollout, _ = episode(*TREES["a tree"])
    failed = rollout._replace(action_mask=rollout.action_mask & False, reward=float("nan"))
    assert not any(one.action_mask.any() for one in chains(failed))
    assert [one.reward for one in chains(rollout._replace(reward=3.0))] == [3.0] * 3


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step([3], after=7), "after = 7; the turns are 0 to 0"),
        (Step([], after=-1), "a prompt of 0 tokens"),
        (Step([3] * 10, after=-1), "a prompt of 10 tokens"),
    ],
)
def test_a_step_that_follows_nothing_is_invalid(step, message):
    builder = EpisodeBuilder(np.array([2, 3], np.int32), (0, 0))
    builder.next_turn(LIMITS, TurnCache())
    zeros = np.zeros(1, np.float32)
    builder.add_completion(Completion(0, 0, np.array([5]), zeros, zeros.astype(int), "stop"))
    with pytest.raises(EpisodeError, match=message):
        builder.add_step(step, LIMITS)
