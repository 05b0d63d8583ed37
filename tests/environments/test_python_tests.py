"""The reward that runs tests in one process against the code of a completion in another."""

import ast
import json
import subprocess
import sys
from collections import Counter, OrderedDict, deque

import pytest
from hypothesis import given, strategies as st

from jaxrl.environments.isolation.inside.encoding import decode, encode
from jaxrl.environments.isolation.inside.testing import split_names
from jaxrl.environments.isolation.sandbox import (
    SandboxLimits,
    UnsupportedTestsError,
    run_python,
    run_tests,
)
from jaxrl.environments.rewards.builtin import python_tests

CODE = r"""
import collections, dataclasses, datetime, decimal, enum, fractions, math

def add(a, b): return a + b
def same(x): return x
def named(self, operation, function, cls, reference=0): return self, operation, function, cls
def sort(x): x.sort()
def corner(m): m[0][0] = 9; return m
def apply(f, x): return f(x)
def count(n): yield from range(n)
def fail(x): raise ValueError("bad", x)
def half(f): return lambda *a: f(*a) / 2
def say(): print("hi")
def total(numbers): return sum(numbers)
def of_type(xs, kind): return [x for x in xs if isinstance(x, kind)]
def big(): return 3**9000
def length(node): return 0 if node is None else 1 + length(node.next)
def odd():
    return [float("inf"), -0.0, "\ud800é", b"\xff", 1j, {1: (2, {3})}, None, True, ..., range(3)]
def exact():
    return fractions.Fraction(1, 3), decimal.Decimal("0.1"), datetime.date(2020, 1, 2)
def counted(): return collections.Counter("aab"), collections.deque([1]), frozenset([2])

def reverse(node):
    last = None
    while node: node.next, last, node = last, node, node.next
    return last

class MyError(ValueError):
    def __init__(self, code):
        super().__init__(code)
        self.code = code

def fail_with(code): raise MyError(code)

class Stack:
    MOST = 3
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __enter__(self): return self
    def __exit__(self, *a): self.items = []

class Special(Stack): pass

@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: int
    def __add__(self, o): return Point(self.x + o.x, self.y + o.y)

class Color(enum.Enum): RED = 1; BLUE = 2

Pair = collections.namedtuple("Pair", "a b")
LIMITS = {"low": [1, 2]}
"""

# Each passes in one process too.
TESTS = {
    "plain data": "assert add(1, 2) == 3 and add('a', b='b') == 'ab' and add([1], [2]) == [1, 2]",
    "names of arguments": "assert named(self=1, operation=2, function=3, cls=4) == (1, 2, 3, 4)",
    "a list that is changed": "x = [3, 1, 2]\nassert sort(x) is None and x == [1, 2, 3]",
    "a list in a list": "m = [[1], [2]]\nassert corner(m) is m and m == [[9], [2]]",
    "the same object": "x = {1: 2}\nassert same(x) is x\nassert same(same) is same",
    "functions of the tests": "assert apply(lambda x: x + 1, 2) == 3 and apply(int, '3') == 3",
    "functions of both": "assert apply(lambda x: add(x, x), 2) == 4 and half(len)('abc') == 1.5",
    "generators": "assert list(count(3)) == [0, 1, 2]\ng = count(2)\nassert next(g) == 0",
    "iterators": "assert total(iter([1, 2])) == total(x for x in (1, 2)) == 3",
    "views": "assert total({1: 2}.values()) == 2 and total(map(abs, [-1])) == 1",
    "exceptions": "try: fail(3)\nexcept ValueError as e: assert e.args == ('bad', 3)\nelse: 1 / 0",
    "own exceptions": "try: fail_with(7)\n"
    "except MyError as e: assert e.code == 7 and e.args == (7,)\nelse: 1 / 0",
    "base exceptions": "try: fail_with(7)\n"
    "except ValueError as e: assert str(e) == '7'\nelse: 1 / 0",
    "exceptions of the tests": "class Mine(Exception): pass\ndef f(x): raise Mine(x)\n"
    "try: apply(f, 4)\nexcept Mine as e: assert e.args == (4,)\nelse: 1 / 0",
    "objects": "s = Stack()\nassert s.push(1).push([2]) is s and len(s) == 2 and s[0] == 1\n"
    "assert list(s) == s.items == [1, [2]] and s.pop() == [2] and [2] not in s and 1 in s\n"
    "with s as t: assert t is s\nassert not s and s.items == []\ns.items = [5]\n"
    "assert s.pop() == 5",
    "classes": "assert isinstance(Special(), Stack) and not isinstance(3, Stack)\n"
    "assert Stack.MOST == 3 and Stack.__name__ == 'Stack'",
    "operators": "p = Point(1, 2)\nassert p == Point(1, 2) != Point(1, 3)\n"
    "assert (p + p).y == 4 and len({p, Point(1, 2)}) == 1 and repr(p) == 'Point(x=1, y=2)'",
    "enumerations": "assert Color.RED is Color(1) and [c.name for c in Color] == ['RED', 'BLUE']",
    "named tuples": "assert Pair(1, 2) == (1, 2) and Pair(1, b=2).b == 2",
    "globals": "assert LIMITS == {'low': [1, 2]}",
    "prints": "import contextlib, io\n"
    "with contextlib.redirect_stdout(io.StringIO()) as out: say()\n"
    "assert out.getvalue() == 'hi\\n'",
    "classes of the tests": "class Node:\n"
    "  def __init__(self, v, n=None): self.v, self.next = v, n\n"
    "assert length(Node(1, Node(2))) == 2\nn = reverse(Node(1, Node(2)))\n"
    "assert isinstance(n, Node) and n.v == 2 and n.next.v == 1 and n.next.next is None",
    "types": "assert of_type([1, 'a', [2]], list) == [[2]]",
    "long numbers": "assert big() == 3**9000",
    "odd values": "assert odd() == [float('inf'), 0.0, '\\ud800é', b'\\xff', 1j, {1: (2, {3})}, "
    "None, True, ..., range(3)]\nassert str(odd()[1]) == '-0.0'",
    "exact numbers": "from fractions import Fraction\nfrom decimal import Decimal\n"
    "import datetime\n"
    "assert exact() == (Fraction(1, 3), Decimal('0.1'), datetime.date(2020, 1, 2))",
    "collections": "import collections\n"
    "assert counted() == (collections.Counter('aab'), collections.deque([1]), frozenset([2]))",
    "a module that the code imports": "assert math.isclose(add(0.1, 0.2), 0.3)",
    "the form of HumanEval": "def check(candidate):\n  assert candidate(2, 3) == 5\ncheck(add)",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n  def test(self):\n"
    "    self.assertEqual(add(1, 2), 3)\n    self.assertAlmostEqual(add(0.1, 0.2), 0.3)\n"
    "    with self.assertRaises(ValueError): fail(1)\n"
    "if __name__ == '__main__': unittest.main()",
}


@pytest.mark.usefixtures("each_wall", "unhurried")
@pytest.mark.parametrize("feature", TESTS)
def test_tests_see_the_codes_names(feature):
    assert run_tests(CODE, TESTS[feature])


def test_the_same_tests_pass_in_one_process():
    for tests in TESTS.values():
        program = f"{CODE}\n{tests}".encode("utf-8", "surrogatepass")
        subprocess.run([sys.executable, "-"], input=program, check=True, capture_output=True)


@pytest.mark.parametrize("feature", TESTS)
def test_each_of_these_tests_can_fail(feature):
    failing = TESTS[feature].replace("assert ", "assert not ", 1)
    failing = failing.replace("assertEqual", "assertNotEqual")
    assert not run_tests(CODE, failing)


@pytest.mark.usefixtures("unhurried")
def test_code_is_rewarded_if_all_tests_pass():
    tests = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
    right = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
    wrong = "```python\ndef add(a, b):\n    return a - b\n```"
    leaves = "```python\nimport os\nos._exit(0)\n```"
    assert python_tests(right, {"tests": tests}) == 1
    assert python_tests(right, {"tests": "\n".join(tests)}) == 1
    assert python_tests("def add(a, b): return a + b", {"tests": tests}) == 1
    assert python_tests(wrong, {"tests": tests}) == 0
    assert python_tests(leaves, {"tests": tests}) == 0
    assert python_tests("no code", {"tests": tests}) == 0
    assert python_tests("", {"tests": tests}) == 0


@pytest.mark.usefixtures("unhurried")
def test_main_block_is_skipped():
    code = """
from __future__ import annotations
import dataclasses

@dataclasses.dataclass
class Sum:
    value: int

def add(a, b):
    return Sum(a + b)

if __name__ == "__main__":
    print(add(int(input()), 2))
"""
    assert python_tests(code, {"tests": ["assert add(1, 2).value == 3"]}) == 1
    assert "EOFError" in run_python(code).stderr


@pytest.mark.parametrize("place", ["at import", "when called", "in the tests"])
def test_endless_code_and_tests_time_out(place):
    code = {"at import": "while True: pass", "when called": "def f():\n    while True: pass"}
    tests = "while True: pass" if place == "in the tests" else "f()"
    assert not run_tests(code.get(place, ""), tests, limits=SandboxLimits(seconds=0.5))


@pytest.mark.parametrize(
    ("tests", "own", "theirs"),
    [
        ("assert f(1) == abs(2)", [], ["f"]),
        ("assert sum(1, 2) == 3", [], ["sum"]),
        ("assert set(sum(1, 2)) == 3", [], []),
        ("assert math.isclose(f(1), abs(x.y))", ["math"], ["f", "x"]),
        ("import math\nassert math.isclose(f(1), 2)", [], ["f", "math"]),
        ("assert copy([1]) == [1]", [], ["copy"]),
        ("def check(g): return sorted(g(1))\ncheck(f)", [], ["check", "f", "g"]),
    ],
)
def test_builtins_and_modules_are_real(tests, own, theirs):
    assert split_names(ast.parse(tests)) == (own, theirs)


# Messages of the protocol itself: one that is odd follows each question.
MESSAGES = {
    "another kind": '["passed", true, [], ""]',
    "not a list": '"P"',
    "an error that ends the process": '["raise", ["builtin", "SystemExit", ["list", [0]]], [], ""]',
    "a reference that does not exist": '["return", ["yours", 1], [], ""]',
    "a function of the tests": '["return", ["type", "exec"], [], ""]',
    "a call of eval": '["ask", "call", [["type", "eval"], "exit(0)"], {}]',
    "a new class": '["ask", "call", [["type", "type"], "X", ["make", "builtins.tuple", '
    '[["list", []]]], ["dict", []]], {}]',
    "a type that is not copied": '["return", ["make", "subprocess.Popen", [["list", ["id"]]]], '
    '[], ""]',
    "other arguments": '["return", 8, [[0, 9], [1, 9], [-1, ["list", []]]], ""]',
    "the names": '["ask", "names", [["list", ["check"]]], {}]',
    "a class named int": '["return", ["mine", 5, [6, "int", ["int", "bool"]]], [], ""]',
    "an endless number": '["return", ["int", "0x' + "f" * 100_000 + '"], [], ""]',
    "nesting": '["return", ' + '["list", [' * 50_000 + "]]" * 50_000 + ', [], ""]',
}


@pytest.mark.parametrize("way", MESSAGES)
def test_no_message_is_rewarded(way):
    code = f"""
import gc, os
def square(x):
    (out,) = (t for t in gc.get_objects() if type(t).__name__ == "Peer")
    rest = {MESSAGES[way]!r}.encode() + b"\\n"
    while rest: rest = rest[out._outgoing.write(rest):]
    return 0
"""
    assert not run_tests(code, "assert square(3) == 9")


_leaves = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    *(st.binary(), st.binary().map(bytearray), st.complex_numbers(allow_nan=False)),
    *(st.decimals(allow_nan=False), st.fractions(), st.dates(), st.datetimes(), st.times()),
    *(st.timedeltas(), st.sampled_from([int, dict, Exception, ..., NotImplemented, range(3)])),
)
_keys = st.one_of(st.integers(), st.text(), st.tuples(st.integers(), st.text()))
_values = st.recursive(
    _leaves,
    lambda x: st.one_of(
        *(st.lists(x), st.dictionaries(_keys, x), st.tuples(x, x), st.sets(_keys)),
        *(st.frozensets(_keys), st.lists(x).map(deque), st.lists(_keys).map(Counter)),
        st.dictionaries(_keys, x).map(OrderedDict),
    ),
    max_leaves=20,
)


@given(_values)
def test_plain_data_arrives_as_it_was_sent(value):
    sent = json.loads(json.dumps(encode(value, pytest.fail)))
    arrived = decode(sent, pytest.fail)
    assert arrived == value
    assert repr(type(arrived)) == repr(type(value))


_tags = st.sampled_from(
    ["int", "list", "dict", "bytes", "make", "namedtuple", "type", "constant", "mine", "yours"]
)
_names = st.one_of(
    st.sampled_from(["builtins.set", "builtins.exec", "os.system", "collections.deque", "type"]),
    st.text(max_size=5),
)
_data = st.recursive(
    st.one_of(_tags, _names, st.integers(-9, 99), st.none()),
    lambda x: st.one_of(
        *(st.lists(x, max_size=3), st.tuples(_tags, x).map(list)),
        *(st.tuples(_tags, x, x).map(list), st.tuples(_tags, _names, st.lists(x)).map(list)),
    ),
)


@given(_data)
def test_decoded_values_are_plain_data(data):
    try:
        value = decode(data, lambda reference: None)
    except Exception:
        return
    safe = {"builtins", "collections", "datetime", "decimal", "fractions"}
    assert type(value).__module__ in safe or isinstance(value, tuple)
    assert not callable(value) or isinstance(value, type)


def test_uncrossable_value_is_named():
    with pytest.raises(UnsupportedTestsError, match="class 'object'"):
        run_tests("def f(x): pass", "f(object())")
    with pytest.raises(UnsupportedTestsError, match="class Child derives"):
        run_tests("class Base: pass", "class Child(Base): pass")
