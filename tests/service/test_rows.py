"""Data of several tenants in rectangular batches."""

from typing import Any

import numpy as np
import pytest

from jaxrl.service.rows import parts
from jaxrl.service.wire import Datum

TOKENS, LENGTHS = 2048, (63, 127, 30, 250, 9, 511)


def datum(number: int, length: int) -> Datum:
    tokens = np.full(length, number, np.int32)
    return Datum(tokens, tokens[:, None], {}, True)


@pytest.mark.parametrize("unit", [1, 2])
@pytest.mark.parametrize("seed", range(len(LENGTHS)))
def test_each_datum_is_in_one_place_and_little_of_a_batch_is_empty(seed: int, unit: int) -> None:
    rng = np.random.default_rng(seed)
    tenants = rng.permutation(9)[: rng.integers(1, 9)].tolist()
    given = iter(range(1, 999))
    requests = [
        [datum(next(given), LENGTHS[seed]) for _ in range(rng.integers(1, 40))] for _ in tenants
    ]
    found = set()
    for part in parts(requests, tenants, tokens=TOKENS, unit=unit):
        segments = part.arrays["segments"]
        count, rows, length = segments.shape
        assert all(size & (size - 1) == 0 for size in (count, rows // unit, length))
        assert rows % unit == 0
        assert segments.size <= max(TOKENS, unit * length)
        empty = (segments == 0).all(axis=2).sum() * length
        assert empty <= max(segments.size / 4, 1024) + unit * length * count
        for place in part.places:
            one = requests[place.request][place.index]
            assert part.tenants[place.tenant] == tenants[place.request]
            at = (place.tenant, place.row, slice(place.begin, place.begin + len(one.tokens)))
            np.testing.assert_array_equal(part.arrays["tokens"][at], one.tokens)
            assert (place.request, place.index) not in found
            found.add((place.request, place.index))
    assert len(found) == sum(map(len, requests))


@pytest.mark.parametrize(
    ("rows", "shapes"), [(4, {(1, 4, 256)}), (1, {(1, 1, 256), (4, 1, 256), (16, 1, 256)})]
)
def test_tenants_in_any_number_need_few_programs(rows: int, shapes: set[Any]) -> None:
    """With 1,024 tokens each they have batches of their own, without padding."""
    found = set()
    for count in range(1, 17):
        requests = [[datum(1, 255)] * rows for _ in range(count)]
        batches = list(parts(requests, range(count), tokens=8192))
        assert sum(len(part.places) for part in batches) == rows * count
        found |= {part.arrays["tokens"].shape for part in batches}
    assert found == shapes
