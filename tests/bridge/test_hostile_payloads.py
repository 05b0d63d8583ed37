"""Whatever a payload holds, reading it raises ManifestError or returns what it says, soon."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxrl.bridge import manifest, payload, safetensors_file
from jaxrl.bridge.base import TensorSpec
from jaxrl.bridge.manifest import Manifest, ManifestEntry, ManifestError
from tests.bridge.cases import LEARNER, ListSource, write_payload

ENTRY = ManifestEntry("a.weight", (2, 3), "bfloat16", "model.safetensors", 64)
TEXT = manifest.dump(Manifest(7, LEARNER, (ENTRY, ENTRY._replace(name="b"))))
EXPECTED = [TensorSpec("a.weight", (2, 3), "bfloat16"), TensorSpec("b", (2, 3), "bfloat16")]
HOSTILE = st.one_of(
    st.sampled_from(
        [None, True, 5, -1, 2**63, 10**400, 0.5, "", "x" * 5000, "..", "a\0b", "\ud800"]
    ),
    st.sampled_from(["/etc/passwd", "\n", "bfloat16", [], {}, ["float32"], [[2, 3]], {"a": 1}]),
    st.sampled_from([[10**4000], [2] * 10_000, [2**62, 2**62], float("nan"), float("inf")]),
)


def read_or_refuse(call: Callable[[], Any]) -> Any:
    """Returns the result, or None if the payload was refused with a message that can be sent."""
    try:
        return call()
    except ManifestError as error:
        message = str(error)
    assert len(message.encode()) < 5000
    return None


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the container and key of every value inside."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


@settings(max_examples=2000)
@given(st.integers(0, 10**6), HOSTILE, st.sampled_from(["replace", "remove", "add"]))
def test_mutated_manifests_are_refused_or_read(where: int, value: Any, how: str) -> None:
    raw = json.loads(TEXT)
    container, key = list(places(raw))[where % len(list(places(raw)))]
    if how == "replace":
        container[key] = value
    elif how == "remove":
        del container[key]
    elif isinstance(container, dict):
        container["extra"] = value
    else:
        container.append(value)
    # Python prints no integer of so many digits; other programs do.
    text = json.dumps(raw, default=str) if value != [10**4000] else TEXT.replace("2", "2" * 5000)
    found = read_or_refuse(lambda: manifest.parse_manifest(text))
    if found is not None:
        assert manifest.parse_manifest(manifest.dump(found)) == found
        read_or_refuse(lambda: manifest.check_tensors(found.entries, EXPECTED))


@settings(max_examples=1000)
@given(st.integers(0, len(TEXT) - 1), st.integers(0, 255), st.integers(0, 3))
def test_mutated_bytes_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, removed: int
) -> None:
    directory = tmp_path_factory.getbasetemp() / "bytes"
    directory.mkdir(exist_ok=True)
    content = TEXT.encode()
    (directory / manifest.FILE).write_bytes(content[:at] + bytes([byte]) + content[at + removed :])
    read_or_refuse(lambda: manifest.read(directory))


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "1" * 5000, TEXT[:-1] + ",}"])
def test_manifest_must_be_json(text: str) -> None:
    with pytest.raises(ManifestError, match="not JSON"):
        manifest.parse_manifest(text)


def fifo(file: Path) -> None:
    os.mkfifo(file)


def link(file: Path) -> None:
    (file.parent / "elsewhere").write_text(TEXT)
    file.symlink_to(file.parent / "elsewhere")


def large(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(10**12)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "fifo": fifo,
    "link": link,
    "directory": Path.mkdir,
    "large": large,
    "device": lambda file: file.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_manifest_must_be_a_small_regular_file(tmp_path: Path, kind: str) -> None:
    SPECIAL[kind](tmp_path / manifest.FILE)
    with pytest.raises(ManifestError, match=r"cannot be read|larger than"):
        within(100, lambda: manifest.read(tmp_path))


@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "device"])
def test_tensors_must_be_a_regular_file(tmp_path: Path, kind: str) -> None:
    SPECIAL[kind](tmp_path / ENTRY.file)
    with pytest.raises(ManifestError, match="cannot be mapped"):
        within(100, lambda: payload.open_tensors(tmp_path, [ENTRY]))


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\ud800", "loop", 5, None, [], ""])
def test_payload_must_name_a_directory(tmp_path: Path, name: Any) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ManifestError):
        payload.resolve(tmp_path, name)


def test_many_tensors_and_duplicates_take_linear_time() -> None:
    """A model of experts has tens of thousands of tensors."""
    count = 40_000
    specs = [TensorSpec(f"a.{i}", (2, 3), "bfloat16") for i in range(count)]
    start = time.process_time()
    file = safetensors_file.plan_file(specs)
    text = manifest.dump(Manifest(1, LEARNER, file.entries))
    manifest.check_tensors(manifest.parse_manifest(text).entries, specs)
    twice = manifest.dump(Manifest(1, LEARNER, (file.entries[0],) * count))
    with pytest.raises(ManifestError, match="occurs twice"):
        manifest.parse_manifest(twice)
    assert time.process_time() - start < 30  # quadratic time took minutes


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Calls a function in a thread that may hang; returns its result or raises its error."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, "it hangs"
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def test_a_manifest_names_its_learner(tmp_path: Path) -> None:
    write_payload(ListSource({"a": np.ones(2, np.float32)}), tmp_path / "p", version=1)
    assert manifest.read(tmp_path / "p").learner == LEARNER
