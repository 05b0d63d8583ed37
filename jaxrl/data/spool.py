"""Lists of rows that may be larger than memory."""

import pickle
import tempfile
import threading
import weakref
from array import array
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T")

_MEMORY = 2**28  # bytes


class Spool(Sequence[T], Generic[T]):
    """A list that moves to a file once its items take more than 256 MB.

    The file is a temporary one without a name, which ends with the process; the variable TMPDIR
    says where. Memory then holds 8 bytes per item. Items are made anew at each access.
    """

    def __init__(self, items: Iterable[T] = ()) -> None:
        """Begins with the items, which must be picklable."""
        self._file = tempfile.SpooledTemporaryFile(_MEMORY)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._ends, self._lock = array("q", [0]), threading.Lock()
        for item in items:
            self.append(item)

    def append(self, item: T) -> None:
        """Appends an item."""
        with self._lock:
            self._file.seek(self._ends[-1])
            self._file.write(pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
            self._ends.append(self._file.tell())

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        start, end = self._ends[place : place + 2]
        with self._lock:
            self._file.seek(start)
            data = self._file.read(end - start)
        return pickle.loads(data)  # its own bytes
