"""Models whose output layer is no longer its embedding."""

import numpy as np

from jaxrl import huggingface
from tests import tiny


def test_a_head_beside_a_tied_embedding_unties_the_checkpoint(tmp_path):
    params = tiny.params()
    head = 2 * params["embed"]
    huggingface.save(tmp_path, {**params, "head": head}, tiny.CONFIG, dtype=np.dtype("float32"))
    untied, saved = huggingface.load(tmp_path, dtype=None)
    assert (tiny.CONFIG.tied, untied.tied) == (True, False)
    np.testing.assert_array_equal(saved["embed"], params["embed"])
    np.testing.assert_array_equal(saved["head"], head)
