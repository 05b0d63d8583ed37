"""Data of several tenants in one rectangular batch: [tenants, rows, tokens]."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl.core import SHARED, Alignment, count_bucket
from jaxrl.service.wire import Datum

_ANYWHERE = SHARED._replace(shared=False)
_CHEAP = 512  # tokens of padding that cost less than a program more, which reads all weights
_ALONE = 1024  # tokens of one tenant that a program computes as fast as a larger batch


class Place(NamedTuple):
    """The place of a datum in a batch."""

    request: int  # index of the request that it belongs to
    index: int  # in the request's data
    tenant: int  # index on the first axis
    row: int
    begin: int


class Part(NamedTuple):
    """A batch that is computed at once.

    Attributes:
      tenants: the tenants of the first axis.
      arrays: "tokens", "segments", "positions", all i32[A, R, T], "targets" i32[A, R, T, K], "mask"
        bool[A, R, T] and the loss's arrays, f32[A, R, T, K]. Only A' = len(tenants) entries of the
        first axis are used. The last token of a row is padding.
      places: of the data in it.
    """

    tenants: Sequence[int]
    arrays: dict[str, np.ndarray]
    places: Sequence[Place]


def parts(
    requests: Sequence[Sequence[Datum]],
    tenants: Sequence[int],
    *,
    tokens: int,
    unit: int = 1,
    align: Alignment = _ANYWHERE,
) -> Iterator[Part]:
    """Packs data into rows and rows into batches.

    Few programs are compiled. Rows, times `unit`, and tokens are powers of two; a tenant with many
    tokens has a batch of its own, and those with few are in batches of 1, 4, 16, ... tenants.
    Sizes are rounded up where that adds little padding; otherwise down, and the rest comes in the
    next batch. A datum is never cut, and only rounding depends on its neighbours.

    Args:
      requests: the data of each; all have the same arrays and number of targets per token.
      tenants: the tenant of each request.
      tokens: the largest batch, padding included; `unit` rows of one tenant always fit.
      unit: the number of devices that rows are divided over.
      align: where data may begin in a row.
    """
    longest = max(len(one.tokens) for data in requests for one in data)
    length = count_bucket(max(longest + 1, 64))
    rows = _rows(requests, tenants, capacity=length - 1, align=align)
    most = _power(max(1, tokens // length // unit))  # units, of all tenants
    while rows:
        sizes = {
            tenant: _size(-(-len(own) // unit), most=most, tokens=unit * length * len(rows))
            for tenant, own in rows.items()
        }
        units = max(sizes.values())
        chosen, own = [x for x, size in sizes.items() if size == units], units * unit * length
        count = 1 if own >= _ALONE else _size(len(chosen), most=most // units, tokens=own, base=4)
        taken = {tenant: rows[tenant][: units * unit] for tenant in chosen[:count]}
        yield _part(requests, taken, shape=(count, units * unit, length))
        rows = {
            tenant: left
            for tenant, of_tenant in rows.items()
            if (left := of_tenant[len(taken.get(tenant, ())) :])
        }


def _size(count: int, *, most: int, tokens: int, base: int = 2) -> int:
    """Rounds a count of something with so many tokens to a power of `base` of at most `most`."""
    down = _power(count, base)
    up = down if down == count else down * base
    padding = up - count
    little = padding <= up // 8 or padding * tokens <= _CHEAP
    return _power(min(up if little else down, most), base)


def _power(count: int, base: int = 2) -> int:
    """Returns the largest power of `base` that is at most `count`."""
    size = 1
    while size * base <= count:
        size *= base
    return size


Row = list[tuple[int, int, int]]  # (request, index, begin) of each datum


def _rows(
    requests: Sequence[Sequence[Datum]], tenants: Sequence[int], *, capacity: int, align: Alignment
) -> dict[int, list[Row]]:
    """Assigns data to rows, first fit; rows of different tenants are apart."""
    rows: dict[int, list[Row]] = {}
    free: dict[int, list[int]] = {}  # from which place on
    for request, (data, tenant) in enumerate(zip(requests, tenants, strict=True)):
        for index, one in enumerate(data):
            ends, size = free.setdefault(tenant, []), len(one.tokens)
            begins = (align.begin(end, size) for end in ends)
            fits = ((row, at) for row, at in enumerate(begins) if at + size <= capacity)
            row, begin = next(fits, (len(ends), 0))
            if row == len(ends):
                ends.append(0)
                rows.setdefault(tenant, []).append([])
            ends[row] = begin + size
            rows[tenant][row].append((request, index, begin))
    return rows


def _part(
    requests: Sequence[Sequence[Datum]],
    rows: Mapping[int, Sequence[Row]],
    *,
    shape: tuple[int, int, int],
) -> Part:
    sample = next(one for data in requests for one in data)
    targets = sample.targets.shape[1]
    arrays = {name: np.zeros(shape, np.int32) for name in ("tokens", "segments", "positions")}
    arrays["mask"] = np.zeros(shape, bool)
    arrays["targets"] = np.zeros((*shape, targets), np.int32)
    arrays |= {name: np.zeros((*shape, targets), np.float32) for name in sample.arrays}
    places = []
    for number, of_tenant in enumerate(rows.values()):
        for row, members in enumerate(of_tenant):
            for segment, (request, index, begin) in enumerate(members, start=1):
                one = requests[request][index]
                size = len(one.tokens)
                at = (number, row, slice(begin, begin + size))
                arrays["tokens"][at] = one.tokens
                arrays["targets"][at] = one.targets
                arrays["segments"][at] = segment
                arrays["positions"][at] = np.arange(size)
                arrays["mask"][at] = True
                for name, values in one.arrays.items():
                    arrays[name][at] = values
                places.append(Place(request, index, number, row, begin))
    return Part(tuple(rows), arrays, places)
