"""Steps of an environment that no turn can follow end their own episode."""

import pytest

from jaxrl.core.batch import to_json
from jaxrl.environments.episodes.base import Step
from tests.environments.test_runner import SCHEDULERS, Talk, run


class Wrong(Talk):
    """Answers the first turn of prompt 1, sample 0, with `wrong`."""

    wrong = Step()

    async def step(self, completion):
        if completion[:2].tolist() == [11, 20]:
            return self.wrong
        return await super().step(completion)


@SCHEDULERS
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Step([2], after="0"), "after = '0'"),
        (Step([2], max_tokens=0), "max_tokens = 0"),
        (Step([2], max_tokens=2.5), "max_tokens = 2.5"),
        (Step([2], stop=lambda tokens: tokens[99]), "stop failed: IndexError"),
        (Step([2], stop=lambda tokens: 0), "stop returned 0"),
    ],
)
def test_a_wrong_place_limit_or_stop_affects_its_episode_only(scheduler, wrong, said):
    whole, _ = run(Talk, scheduler=scheduler)
    rollouts, failure = run(type("W", (Wrong,), {"wrong": wrong}), scheduler=scheduler)
    assert failure is not None
    assert said in failure
    for k, (one, undisturbed) in enumerate(zip(rollouts, whole, strict=True)):
        if k != 2:
            assert to_json(one) == to_json(undisturbed)
        else:
            assert one.episode.end == "invalid"
            assert one.completion.tolist() == [11, 20, 30, 1]
