"""Rows on disk are the rows that were given, in their order."""

import pickle
import tracemalloc

import numpy as np
import pytest

from jaxrl.data import spool
from jaxrl.data.prompts import Example
from jaxrl.data.spool import Spool


def test_items_are_the_same_in_memory_and_on_disk(monkeypatch):
    given = [{"prompt": "x" * i, "tokens": list(range(i))} for i in range(50)]
    for limit in (spool._MEMORY, 100):  # the second moves to a file on the way
        monkeypatch.setattr(spool, "_MEMORY", limit)
        rows = Spool(given[:20])
        assert rows[3] == given[3]
        for row in given[20:]:
            rows.append(row)
        assert list(rows) == given
        assert (rows[0], rows[-1], rows[np.int64(7)]) == (given[0], given[-1], given[7])
        assert rows[5:9] == given[5:9]
        assert rows[:-40:3] == given[:-40:3]
        assert len(rows) == len(given)
        assert not Spool[int]()
        with pytest.raises(IndexError):
            rows[len(given)]


def test_examples_keep_their_arrays_and_columns():
    record = {"prompt": "1+1=", "answer": "2", "entry": {"metadata": {"seed": 3}}}
    (found,) = Spool([Example(np.arange(4, dtype=np.int32), record, record)])
    assert found.tokens.dtype == np.int32
    assert found.tokens.tolist() == [0, 1, 2, 3]
    assert dict(found) == dict(found.row) == record


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(spool, "_MEMORY", 2**16)
    size, row = 2000, b"x" * 1000
    assert size * len(pickle.dumps(row)) > 2_000_000
    tracemalloc.start()
    rows = Spool(row for _ in range(size))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 100_000
    assert rows[-1] == row
