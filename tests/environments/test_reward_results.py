"""What is read from a completion, and from what a reward function returns."""

import numpy as np
import pytest

from jaxrl.environments.rewards import builtin
from jaxrl.environments.rewards.batches import batched
from jaxrl.environments.rewards.builtin import python_tests
from jaxrl.environments.rewards.score import Reward, score


@pytest.mark.parametrize(
    "completion",
    [
        "```\nX\n```",
        "```python\nX\n```",
        "```python3\nX\n```",
        "```Python \nX\n```",
        "```bash\npip install x\n```\nThen:\n```py\nX\n```",
        "Write ```X``` so:\n```python\nX\n```\nIt prints\n```text\n1\n```",
        "X\n",
    ],
)
def test_tested_code_is_the_last_block_of_python(monkeypatch, completion):
    monkeypatch.setattr(builtin, "run_tests", lambda code, tests: code == "X\n")
    assert python_tests(completion, {"tests": ""}) == 1


@pytest.mark.parametrize("returned", [{0: 0.5, 1: 0.5}, "11", {1.0, 0.0}])
def test_items_of_a_mapping_or_text_are_no_rewards(returned):
    term = Reward("own", batched(lambda completions, examples: returned), 1.0)
    scored = score([term], ["a", "b"], [{}] * 2)
    assert np.isnan(scored.total).all()
    assert "return a list of 2 numbers" in str(scored.first_failure)
