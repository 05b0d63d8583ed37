"""Code that tries to earn the reward of its tests without passing them."""

import time
from pathlib import Path

import pytest

from jaxrl.environments.isolation.sandbox import run_tests
from jaxrl.environments.rewards.builtin import python_tests

pytestmark = pytest.mark.usefixtures("each_wall")

TESTS = """
def check(candidate):
    assert candidate(3) == 9
    assert abs(candidate(1.5) - 2.25) < 1e-9
    assert candidate(4) in (16, 16.0)
    assert sorted([candidate(2), candidate(1)]) == [1, 4]
    assert str(candidate(5)) == "25" and isinstance(candidate(5), int)

check(square)
"""

# A class whose objects agree with everything, as far as Python lets them.
AGREES = """
class Agrees(int):
    def __new__(cls, *args): return int.__new__(cls, 9)
    def __getattr__(self, name): return self
    def __call__(self, *args): return self
    __eq__ = __le__ = __ge__ = __lt__ = __gt__ = __ne__ = __bool__ = lambda *a: True
    __contains__ = __instancecheck__ = __subclasscheck__ = lambda *a: True
    __sub__ = __rsub__ = __add__ = __radd__ = __abs__ = lambda *a: Agrees()
    __hash__ = __len__ = lambda *a: 9
    __float__ = lambda *a: 2.25
    __iter__ = lambda self: iter([1, 4])
    def __str__(self): return "25"
"""

WRITES = """
import os
for fd in range(64):
    for text in (b"P", b"1P", b"passed\\n", b'["return", true, [], ""]\\n'):
        try: os.write(fd, text)
        except OSError: pass
"""

FORGERIES = {
    "exits before the tests": "import os; os._exit(0)",
    "exits with each status": "import os\ndef square(x): os._exit(int(x) % 3)",
    "sys.exit at once": "import sys; sys.exit(0)",
    "sys.exit when tested": "import sys\ndef square(x): sys.exit(0)",
    "SystemExit as a value": "def square(x): raise SystemExit(0)",
    "KeyboardInterrupt": "def square(x): raise KeyboardInterrupt",
    "GeneratorExit": "def square(x): raise GeneratorExit",
    "exit at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef square(x): raise 1",
    "equals everything": AGREES + "def square(x): return Agrees()",
    "equals everything and is no integer": AGREES.replace("(int)", "")
    .replace("int.", "object.")
    .replace("cls, 9", "cls")
    + "__class__ = int\ndef square(x): return Agrees()",
    "claims another class": """
class Agrees:
    __class__ = property(lambda self: int)
    __eq__ = __lt__ = lambda *a: True
    __sub__ = __abs__ = lambda self, *a: self
def square(x): return Agrees()
""",
    "a class instead of a function": AGREES
    + "class square(Agrees):\n  def __init__(self, x): pass",
    "a class that is its own instance": AGREES + "square = Agrees()",
    "a named tuple that agrees": """
import collections
class Agrees(collections.namedtuple("Agrees", "x")):
    __eq__ = __lt__ = __sub__ = lambda *a: True
def square(x): return Agrees(x)
""",
    "a metaclass that agrees": """
class Meta(type):
    __eq__ = __lt__ = lambda *a: True
    __sub__ = __abs__ = lambda self, *a: self
    __hash__ = type.__hash__
class Agrees(metaclass=Meta): pass
def square(x): return Agrees
""",
    "replaces builtins.exec": """
import builtins
run = builtins.exec
builtins.exec = lambda code, *a: run(code, *a) if code.co_names == ("print",) else None
""",
    "replaces builtins.compile": """
import builtins
real = builtins.compile
builtins.compile = lambda text, *a, **k: real("pass" if b"assert" in bytes(text) else text, *a)
""",
    "replaces sys.exit": "import sys\nsys.exit = lambda *a: None",
    "replaces os._exit": "import os\nos._exit = lambda *a: None\ndef square(x): return 0",
    "requests the parts and prints the last": """
import os
for end, other in ((4, 5), (5, 4), (3, 4), (4, 3), (5, 6), (6, 5)):
    try: os.set_blocking(other, False)
    except OSError: continue
    import time
    parts = b""
    for _ in range(3):
        try: os.write(end, b"1"); time.sleep(0.05); parts += os.read(other, 1 << 16)
        except OSError: pass
    if parts: print(parts.decode()[-18:-2], flush=True); os._exit(0)
""",
    "finds the descriptors by their kind": """
import os, re, stat, time
pipes = [fd for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{fd}")]
text = ""
for _ in range(4):
    for fd in pipes:
        try: os.set_blocking(fd, False); os.write(fd, b"1")
        except OSError: pass
    time.sleep(0.02)
    for fd in pipes:
        try: text += os.read(fd, 1 << 16).decode()
        except OSError: pass
for token in re.findall("'([0-9a-f]{16})'", text): print(token, flush=True)
if text: os._exit(0)
""",
    "reads the parts through the caller's frames": """
import os, sys
frame = sys._getframe()
while frame:
    if "parts" in frame.f_locals:
        parts, asks = frame.f_locals["parts"], frame.f_locals["asks"]
        for _ in range(2):
            os.write(asks, b"1")
            text = parts.read(int(parts.readline().split()[1]))
        exec(text)
        sys.stdout.flush()
        os._exit(0)
    frame = frame.f_back
""",
    "replaces len, abs, sorted, isinstance": """
import builtins
for name in ("len", "abs", "sorted", "isinstance", "str", "any", "all", "print"):
    setattr(builtins, name, lambda *a, **k: True)
def square(x): return True
""",
    "defines abs, sorted, isinstance and check": """
def abs(x): return 0
def sorted(x): return [1, 4]
def isinstance(*a): return True
def check(candidate): pass
AssertionError = ZeroDivisionError
def square(x): return 9
""",
    "no assertions": """
import builtins
class AssertionError(BaseException):
    def __new__(cls, *a): raise SystemExit(0)
builtins.AssertionError = AssertionError
def square(x): return 0
""",
    "unittest that never fails": """
import unittest
unittest.TestCase.assertEqual = lambda *a: None
unittest.main = lambda *a, **k: None
def square(x): return 0
""",
    "frames of the caller": """
import sys
def square(x):
    frame = sys._getframe()
    while frame:
        for name, value in {**frame.f_globals, **frame.f_locals}.items():
            if callable(value):
                frame.f_globals[name] = lambda *a, **k: 9
        frame = frame.f_back
    return 0
""",
    "frames by inspect": """
import inspect
def square(x):
    for info in inspect.stack():
        for value in list(info.frame.f_locals.values()):
            for constant in getattr(getattr(value, "__code__", None), "co_consts", ()):
                if constant: print(constant, flush=True)
    raise SystemExit(0)
""",
    "everything in memory": """
import gc, sys
def square(x):
    for thing in gc.get_objects():
        if isinstance(thing, dict):
            for key in list(thing):
                if key in ("passed", "check", "tests", "candidate", "printed"):
                    thing[key] = lambda *a: "P"
    return 0
""",
    "traces the tests": """
import sys, threading
def trace(frame, event, value):
    for name in list(frame.f_locals):
        frame.f_locals[name] = 9
    return trace
sys.settrace(trace); threading.settrace(trace); sys.setprofile(trace)
def square(x): return 0
""",
    "audit hook": "import sys, os\nsys.addaudithook(lambda *a: os._exit(0))",
    "writes to all descriptors": WRITES + "def square(x): return 0",
    "writes to all descriptors and exits": WRITES + "os._exit(0)",
    "reads all descriptors": """
import os, re
for fd in range(3, 64):
    try: os.set_blocking(fd, False); found = os.read(fd, 1 << 16)
    except OSError: continue
    print(found, flush=True); os.write(1, found)
os._exit(0)
""",
    "opens the descriptors again": """
import os
def square(x):
    for fd in range(64):
        for mode in (os.O_WRONLY, os.O_RDWR):
            try: os.write(os.open(f"/proc/self/fd/{fd}", mode), b'["return", 9, [], ""]\\nP1P')
            except OSError: pass
    os._exit(0)
""",
    "closes all descriptors": "import os; os.closerange(0, 64)",
    "forges the proof on stdout": "print('P\\n1P\\npassed', flush=True)\nimport os; os._exit(0)",
    "forges the proof in an answer": """
import sys
def square(x): print("P1P" * 999); sys.stdout.flush(); return 0
""",
    "memory of the parent": """
import os
for pid in (1, os.getppid(), os.getpid() - 1, "self"):
    try: open(f"/proc/{pid}/mem", "r+b").write(b"P" * 4096)
    except OSError: pass
    try: print(open(f"/proc/{pid}/environ").read(), open(f"/proc/{pid}/cmdline").read())
    except OSError: pass
os._exit(0)
""",
    "ptrace of the parent and of all others": """
import ctypes, os
libc = ctypes.CDLL(None)
for pid in {os.getppid(), *range(200)} - {os.getpid()}:
    libc.ptrace(16, pid, 0, 0)
    libc.process_vm_writev(pid, None, 0, None, 0, 0)
def square(x): return 0
""",
    "kills its group": "import os\nos.kill(0, 9)",
    "stops its group": "import os\nos.kill(0, 19)\ndef square(x): return 0",
    "kills and stops everyone": """
import os, signal
for number in (9, 19, 15, 2, 1):
    for pid in (0, -1, 1, os.getppid(), *range(2, 300)):
        try: os.kill(pid, number)
        except OSError: pass
def square(x): return 0
""",
    "ends by a signal": "import ctypes\nctypes.string_at(0)",
    "continues in a child": "import os\nif os.fork(): os._exit(0)\ndef square(x): return 0",
    "many children answer": """
import os
def square(x):
    for _ in range(5): os.fork()
    return 0
""",
    "a thread answers first": """
import os, threading
def flood():
    while True:
        for fd in range(3, 12):
            try: os.write(fd, b'["return", 9, [], ""]\\n')
            except OSError: pass
threading.Thread(target=flood, daemon=True).start()
def square(x): return 0
""",
    "the environment": """
import os
os.environ.update(PYTHONOPTIMIZE="1", PYTHONSTARTUP="/tmp/x.py", PYTHONPATH="/tmp")
open("/tmp/sitecustomize.py", "w").write("import os; os._exit(0)")
def square(x): return 0
""",
    "offers more names than asked for": """
import sys
def abs(x): return 0
def isinstance(*a): return True
Peer = sys.modules["inside.peer"].Peer
encode = Peer._encode
def forged(self, value):
    if type(value) is dict and "square" in value:
        value = {**value, "abs": abs, "isinstance": isinstance, "str": lambda x: "25",
                 "sorted": lambda x: [1, 4], "check": lambda x: None}
    return encode(self, value)
Peer._encode = forged
def square(x): return 9 if x == 3 else 16 if x == 4 else 0
""",
    "the sandbox's own source": """
import sys
for name, module in list(sys.modules.items()):
    for key, value in list(vars(module).items()):
        if name.startswith("inside") and callable(value) and not isinstance(value, type):
            setattr(module, key, lambda *a, **k: "P")
def square(x): return 0
""",
    "unpicklable and deep data": """
def square(x):
    deep = []
    for _ in range(100_000): deep = [deep]
    return deep
""",
    "very much data": "def square(x): return 'P' * (400 << 20)",
    "tests on disk": """
import os
found = [os.path.join(d, f) for d, _, files in os.walk("/") for f in files if "test" in f]
for path in found[:1000]:
    if "assert square" in open(path, errors="ignore").read(): os._exit(0)
def square(x): return 0
""",
}


def test_code_that_passes_is_rewarded():
    assert python_tests("def square(x): return x * x", {"tests": TESTS}) == 1


@pytest.mark.parametrize("way", FORGERIES)
def test_no_forgery_is_rewarded(way):
    start = time.monotonic()
    assert python_tests(FORGERIES[way], {"tests": TESTS}) == 0
    assert time.monotonic() - start < 5 + 250, "the limit is 5 s; the rest is the start"


def test_code_cannot_find_the_tests():
    """Neither in its files nor in its memory, also while it is tested."""
    look = """
import os, re
def square(x):
    hits = []
    for line in open("/proc/self/maps"):
        start, end = (int(n, 16) for n in line.split()[0].split("-"))
        if "r" in line.split()[1] and end - start < 1 << 26:
            with open("/proc/self/mem", "rb", 0) as memory:
                try:
                    memory.seek(start)
                    hits.append(re.search(b"7319[8]221", memory.read(end - start)))
                except (OSError, ValueError): pass
    return any(hits) or "none"
"""
    tests = 'secret = "73198221"\nassert square(1) == "none"'
    assert python_tests(look, {"tests": tests}) == 1


def test_redefined_modules_and_names_do_not_judge():
    cheats = """
class math:
    isclose = staticmethod(lambda *a: True)
def root(x): return 0
"""
    honest = "import math\ndef root(x): return math.sqrt(x)"
    tests = "assert math.isclose(root(4), 2)"
    assert python_tests(cheats, {"tests": tests}) == 0
    assert python_tests(honest, {"tests": tests}) == 1


def test_function_may_shadow_a_builtin():
    tests = "assert sum(10, 15) == 6"
    assert python_tests("def sum(a, b): return 6", {"tests": tests}) == 1
    assert python_tests("def sum(a, b): return 7", {"tests": tests}) == 0


def test_what_remains_possible_as_the_documentation_says():
    page = (Path(__file__).parents[2] / "docs/sandbox.md").read_text()
    code, _, lines = page.partition("class Point:")[2].partition("\n```")[0].partition("\n\n")
    code = f"class Point:{code}\ndef is_sorted(x): return True\ndef sort(x): x.clear(); return x"
    for line in lines.splitlines():
        deceived = run_tests(code, f"given = [2, 1]\n{line}")
        assert deceived == ("# passes" in line), line


def test_code_cannot_mask_its_score():
    tests = "assert call(lambda x: object()) == 1"
    code = "def call(f):\n    try: f(0)\n    except TypeError: pass\n    return 2"
    assert python_tests(code, {"tests": tests}) == 0
