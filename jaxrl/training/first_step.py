"""The first step of a start, which compiles: what it took the last time, and what it took now."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import xxhash

from jaxrl.core import read_whole, write_whole
from jaxrl.tracking.tracker import NullTracker, Tracker

_COMPILED = "/jax/core/compile/backend_compile_duration"  # also of programs read from the cache
_FILE = "first_steps.json"  # beside the compiled programs
_NAMED = 3  # programs that the line names
_KEPT = 200  # entries of the file


@contextmanager
def first_step(
    shapes: Any, *, tracker: Tracker | NullTracker, done: bool = False
) -> Iterator[Callable[[], None]]:
    """Says how long the first step of a run with the same shapes took the last time, if that is
    known; `done` is True if no step is left.

    `shapes` is a tree of arrays and of values that the compiled programs depend on.

    Yields:
      A function to call after each step. The first call records the step's programs and seconds
      beside JAX's cache of compiled programs.
    """
    compiled: Counter[str] = Counter()

    def count(event: str, duration_secs: float, **about: Any) -> None:
        if event == _COMPILED:
            compiled[str(about.get("fun_name", "?"))] += 1
            spent[0] += duration_secs

    spent, began = [0.0], time.perf_counter()
    file, key = _file(), _key(shapes)
    if not done:
        tracker.note(_before(_read(file).get(key)))

    def after() -> None:
        nonlocal done
        if done:
            return
        done, seconds = True, time.perf_counter() - began
        programs = sum(compiled.values())
        names = ", ".join(name for name, _ in compiled.most_common(_NAMED))
        tracker.detail(
            f"the first step was done after {seconds:.0f} s; {programs} programs ({names}, ...) "
            f"were compiled or read from the cache, in {spent[0]:.0f} s of all threads"
        )
        if file is not None:
            kept = {**_read(file), key: {"programs": programs, "seconds": round(seconds, 1)}}
            with suppress(OSError):  # a cache that cannot be written
                write_whole(file, json.dumps(dict(list(kept.items())[-_KEPT:])))

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield after
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


def _before(last: dict[str, Any] | None) -> str:
    text = "until its first step is done, a run compiles its programs"
    if last is None:
        settings: Any = jax.config
        kept = settings.jax_compilation_cache_dir and settings.jax_enable_compilation_cache
        return f"{text}; the next start takes them from a cache" if kept else text
    return f"{text}: the last time {last['programs']}, in {last['seconds']:.0f} s"


def _file() -> Path | None:
    settings: Any = jax.config  # whose names type checkers do not see
    directory: str | None = settings.jax_compilation_cache_dir
    return None if not directory or "://" in directory else Path(directory, _FILE)


def _key(shapes: Any) -> str:
    described = jax.tree.map(lambda x: getattr(x, "aval", x), shapes)
    text = f"{jax.__version__} {jax.devices()[0].device_kind} {len(jax.devices())} {described}"
    return xxhash.xxh3_64_hexdigest(text.encode())


def _read(file: Path | None) -> dict[str, Any]:
    """Returns the entries of the file, without damaged ones; none if it is missing or damaged."""
    try:
        found = json.loads((read_whole(file) if file else None) or b"{}")
    except (OSError, ValueError):
        return {}
    return {k: v for k, v in found.items() if _is_entry(v)} if isinstance(found, dict) else {}


def _is_entry(value: Any) -> bool:
    names = ("programs", "seconds")
    return isinstance(value, dict) and all(isinstance(value.get(n), int | float) for n in names)
