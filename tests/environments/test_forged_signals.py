"""Code that answers its tests with a signal that Python's own loops and statements act on."""

import pytest

from jaxrl.environments.rewards.builtin import python_tests

pytestmark = pytest.mark.usefixtures("each_wall")

SUM = "def add(a, b): return a + b"
WRONG = "def add(a, b): return 0\n"
STOP = "def add(a, b): raise StopIteration"
VALUE = """
class Value:
    def __init__(self, n): self.n = n
    @property
    def number(self): return self.n
    def __len__(self): return self.n
    def __hash__(self): return self.n
    def __getitem__(self, i): return self.n
    def __iter__(self): return iter([self.n])
def add(a, b): return Value(a + b)
"""
ASYNC = """
import asyncio
class Sums:
    left = [(1, 2)]
    def __aiter__(self): return self
    async def __anext__(self):
        if not self.left: raise StopAsyncIteration
        return add(*self.left.pop())
async def check():
    async for got in Sums(): assert got == 3
asyncio.run(check())
"""
ITERATOR = """
class Sums:
    left = [(1, 2)]
    def __iter__(self): return self
    def __next__(self):
        if not self.left: raise StopIteration
        return add(*self.left.pop())
for got in Sums(): assert got == 3
"""
RAISES = "try:\n  add(1, 'a')\n  assert False\nexcept BadSum: pass"
OWN_ERROR = "class BadSum(Exception): pass\ndef add(a, b): raise BadSum"
CHANGES_THE_WANTED_NAMES = """
import sys
Peer = sys.modules["inside.peer"].Peer
encode, changes = Peer._encode, Peer._changes
def forged(self, value):
    if type(value) is dict and "add" in value: value = {**value, "abs": lambda x: 0}
    return encode(self, value)
def more(self, data, arguments):
    if arguments == [["add"]]: return [[0, ["list", ["abs", "add"]]]]
    return changes(self, data, arguments)
Peer._encode, Peer._changes = forged, more
def add(a, b): return 0
"""
BASE = "class Base:\n    def number(self): return 3\nbase = Base()"
ANYTHING = """
class Anything:
    def __init__(self, *args): pass
    def __call__(self, *args): return self
    def __getattr__(self, name): return self
base = Anything()
"""
OF_OBJECT = "class Test(base):\n    def check(self): assert self.number() == 3\nTest().check()"


def stops_in(method: str, error: str = "StopIteration") -> str:
    """Writes code whose objects raise an exception in a method."""
    start, _, rest = VALUE.partition(f"def {method}(")
    arguments, _, rest = rest.partition(": ")
    return f"{start}def {method}({arguments}: raise {error}\n{rest.partition(chr(10))[2]}"


# Tests, code that passes them, code that would pass them by a signal.
FORGERIES = {
    "all(map(...))": ("assert all(map(lambda x, y: add(x, x) == y, [1, 2], [2, 4]))", SUM, STOP),
    "a loop over map": ("for got in map(add, [1], [2]): assert got == 3", SUM, STOP),
    "zip": ("for got, want in zip(map(add, [1], [2]), [3]): assert got == want", SUM, STOP),
    "filter": ("assert not next(filter(lambda n: add(n, 1) != n + 1, [1, 2]), 0)", SUM, STOP),
    "iter with a sentinel": (
        "for got in iter(lambda: add(1, 2), None):\n  assert got == 3\n  break",
        SUM,
        STOP,
    ),
    "a class derived from StopIteration": (
        "assert all(map(lambda x: add(x, x) == 2 * x, [1, 2]))",
        SUM,
        "class Mine(StopIteration): pass\ndef add(a, b): raise Mine",
    ),
    "an iterator of the tests": (ITERATOR, SUM, STOP),
    "an asynchronous iterator of the tests": (ASYNC, SUM, STOP.replace("Stop", "StopAsync")),
    **{
        method: (
            f"import operator\nfor got in map({call}, [add(1, 2)]): assert got == {want}",
            VALUE,
            stops_in(method),
        )
        for method, call, want in (
            ("__len__", "len", "3"),
            ("__hash__", "hash", "3"),
            ("__iter__", "list", "[3]"),
            ("__getitem__", "operator.itemgetter(0)", "3"),
            ("number", "operator.attrgetter('number')", "3"),
        )
    },
    "AssertionError by another name": (
        RAISES,
        OWN_ERROR,
        "def add(a, b): return 0\nBadSum = Exception",
    ),
    "AssertionError in a tuple": (
        RAISES,
        OWN_ERROR,
        WRONG + "BadSum = (ValueError, AssertionError)",
    ),
    "AssertionError in a class": (
        RAISES.replace("add", "Sum().add").replace("BadSum", "Sum.Bad"),
        "class Sum:\n  Bad = ValueError\n  def add(self, a, b): raise ValueError",
        "class Sum:\n  Bad = AssertionError\n  def add(self, a, b): return 0",
    ),
    "a change of the wanted names": (
        "assert abs(add(1, 2) - 3) < 1e-9",
        SUM,
        CHANGES_THE_WANTED_NAMES,
    ),
}


@pytest.mark.parametrize("way", FORGERIES)
def test_no_signal_is_rewarded(way):
    tests, right, forged = FORGERIES[way]
    assert python_tests(right, {"tests": tests}) == 1
    assert python_tests(forged, {"tests": tests}) == 0


def test_no_class_is_made_from_an_object():
    """In one process too, a class statement over an object that is no class fails."""
    assert python_tests(BASE, {"tests": "assert base.number() == 3"}) == 1
    assert python_tests(ANYTHING, {"tests": OF_OBJECT}) == 0


@pytest.mark.parametrize("signal", ["GeneratorExit", "KeyboardInterrupt", "SystemExit(0)"])
@pytest.mark.parametrize("method", ["__len__", "__iter__", "number"])
def test_no_end_of_the_program_is_rewarded(method, signal):
    tests = "import operator\nassert all(map({}, [add(1, 2)]))"
    call = {"__len__": "len", "__iter__": "list"}.get(method, "operator.attrgetter('number')")
    assert python_tests(VALUE, {"tests": tests.format(call)}) == 1
    assert python_tests(stops_in(method, signal), {"tests": tests.format(call)}) == 0


def test_iterators_of_the_code_end_as_in_one_process():
    code = """
def count(n):
    got = yield from range(n)
    return got
def echo():
    got = yield 0
    return got
class Down:
    def __init__(self, n): self.n = n
    def __iter__(self): return self
    def __next__(self):
        if not self.n: raise StopIteration
        self.n -= 1
        return self.n
"""
    tests = """
assert list(count(2)) == list(map(int, count(2))) == [0, 1] and list(Down(2)) == [1, 0]
assert next(count(0), None) is None and next(Down(0), 7) == 7
e = echo()
assert next(e) == 0
try: e.send(5)
except StopIteration as stop: assert stop.value == 5
else: assert False
e = echo()
next(e)
try: e.throw(ValueError)
except ValueError: pass
else: assert False
"""
    assert python_tests(code, {"tests": tests}) == 1
