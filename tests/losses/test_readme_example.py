"""The README's custom loss, run as a user would name it."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.losses import build, objective, reinforce, token_mean
from tests.losses.cases import lay_out, random_sequences

README = Path(__file__).parents[2] / "README.md"


def test_custom_loss_in_a_file(tmp_path):
    path = tmp_path / "my_loss.py"
    (example,) = re.findall(r"```python\n(# my_loss\.py\n.*?)```", README.read_text(), re.DOTALL)
    path.write_text(example)
    recipe = build(f"{path}:soft_gate", {"tau": 2.0, "ratio": "over_anchor"})
    assert recipe.objective.needs == {"anchor", "reference"}

    # Where nothing moved, the gate's gradient is REINFORCE's and the KL term's is zero.
    sequences = random_sequences(0, spread=0.0)
    scores, batch = lay_out(sequences, [[i] for i in range(len(sequences))])

    @jax.jit
    def gradients(logprobs):
        def total(reduced):
            return lambda lp: reduced.total(scores.replace(logprobs=lp), batch)[0]

        plain = objective(reinforce(), token_mean)
        return [jax.grad(total(reduced))(logprobs) for reduced in (recipe.objective, plain)]

    own, expected = gradients(scores.logprobs)
    assert jnp.abs(expected).max() > 0
    np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
