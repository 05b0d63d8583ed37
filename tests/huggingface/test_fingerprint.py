"""Digests that compare the model of one host with that of another."""

import shutil

from jaxrl.huggingface import Checkpoint
from jaxrl.huggingface.files import SINGLE
from tests import tiny


def test_a_fingerprint_names_the_file_that_differs(tmp_path):
    """The same files elsewhere have the same fingerprint."""
    tiny.write_checkpoint(tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    weights = tmp_path / "copy" / SINGLE
    before = Checkpoint(tmp_path / "model").fingerprint()
    assert Checkpoint(weights.parent).fingerprint() == before
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    after = Checkpoint(weights.parent).fingerprint()
    assert [name for name in before if after[name] != before[name]] == [SINGLE]
