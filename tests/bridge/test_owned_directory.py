"""Directories stay while their owner lives; after a kill they go with what belongs to them."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from jaxrl.bridge.owned_directory import BELONGINGS, LOCK, OwnedDirectory

OWNER = """
import sys
from pathlib import Path
from jaxrl.bridge.owned_directory import OwnedDirectory
owned = OwnedDirectory(Path(sys.argv[1]))
(owned.path / "model").mkdir()
(owned.path / "model" / "weights").write_bytes(b"weights")
print(owned.path, flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(parent: Path) -> Iterator[tuple[Path, subprocess.Popen]]:
    """Runs a process with a directory; kills it at the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield Path(process.stdout.readline().strip()), process
        finally:
            process.kill()


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_only_directories_of_dead_processes_go(tmp_path: Path) -> None:
    (tmp_path / "jaxrl-owned-foreign").mkdir()
    (tmp_path / "jaxrl-owned-foreign" / "file").touch()
    with owner(tmp_path) as (directory, _):
        with OwnedDirectory(tmp_path) as own:
            assert names(tmp_path) == {directory.name, own.path.name, "jaxrl-owned-foreign"}
        assert names(directory) == {LOCK, "model"}
    assert names(directory) == {LOCK, "model"}
    with OwnedDirectory(tmp_path):
        assert not directory.exists()
    assert names(tmp_path) == {"jaxrl-owned-foreign"}  # nobody has ever locked it


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="makes a namespace with bubblewrap")
def test_a_container_leaves_the_directories_of_others(tmp_path: Path) -> None:
    """It sees none of the processes outside."""
    code = (
        "import os, sys; from pathlib import Path; import numpy as np\n"
        "from jaxrl.bridge.shared_memory import SharedMemoryPublisher\n"
        "assert not os.path.exists('/proc/' + sys.argv[2])\n"
        "f32 = np.dtype('float32')\n"
        "SharedMemoryPublisher([], wire=f32, sampler=f32, memory=Path(sys.argv[1])).close()"
    )
    walls = ["bwrap", "--dev-bind", "/", "/", "--unshare-pid", "--proc", "/proc"]
    if subprocess.run([*walls, "true"], check=False).returncode:
        pytest.skip("no namespaces here")
    with owner(tmp_path) as (directory, process):
        arguments = [str(tmp_path), str(process.pid)]
        subprocess.run([*walls, sys.executable, "-c", code, *arguments], check=True)
        assert names(directory) == {LOCK, "model"}


def test_an_owner_ends_with_its_last_process(tmp_path: Path) -> None:
    """A server keeps its directory if its learner and its watchdog are killed."""
    owned = OwnedDirectory(tmp_path)
    with subprocess.Popen(["sleep", "300"], pass_fds=[owned.lock]) as heir:
        os.close(owned.lock)
        try:
            OwnedDirectory(tmp_path).close()
            assert owned.path.exists()
        finally:
            heir.kill()
    OwnedDirectory(tmp_path).close()
    assert not owned.path.exists()


def test_belongings_go_with_the_directory(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("psm_mine", "psm_renewed", "psm_foreign")]
    for file in files:
        file.touch()
    lines = [f"{files[0].stat().st_ino} psm_mine", "1 psm_renewed", "x", "9 psm_gone", ""]
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.touch()
    lines.append(f"{outside.stat().st_ino} ../{outside.name}")
    with owner(tmp_path) as (directory, _):
        (directory / BELONGINGS).write_text("\n".join(lines))
    with OwnedDirectory(tmp_path) as own:
        assert names(tmp_path) == {"psm_renewed", "psm_foreign", own.path.name}
    assert outside.exists()


def test_killed_removal_is_still_known(tmp_path: Path) -> None:
    with owner(tmp_path) as (directory, _):
        pass
    with pytest.MonkeyPatch.context() as patch:

        def killed(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            OwnedDirectory(tmp_path)
    assert LOCK in names(directory)
    (tmp_path / "jaxrl-owned-new").mkdir()  # killed before it was locked
    with OwnedDirectory(tmp_path) as own:
        assert names(tmp_path) == {own.path.name}


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with OwnedDirectory(tmp_path) as own:
            assert own.path.stat().st_mode & 0o777 == 0o700
            assert (own.path / LOCK).stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def test_without_locks_nothing_is_removed(tmp_path: Path) -> None:
    with owner(tmp_path) as (directory, _):
        pass
    with pytest.MonkeyPatch.context() as patch:

        def unsupported(*_: object) -> None:
            raise OSError(38, "Function not implemented")

        patch.setattr("fcntl.flock", unsupported)
        with OwnedDirectory(tmp_path) as own:
            assert own.path.exists()
    assert directory.exists()


@settings(max_examples=500)
@given(st.lists(st.text(max_size=20) | st.binary(max_size=20), max_size=5))
def test_damaged_list_removes_nothing_foreign(lines: list[str | bytes]) -> None:
    """Names of files that exist, with inodes that are theirs or not, and any bytes."""
    with tempfile.TemporaryDirectory() as parent:
        foreign = Path(parent) / "sub"
        foreign.mkdir()
        file, mine = foreign / "file", Path(parent) / "psm_mine"
        file.touch()
        mine.touch()
        shown = [
            *(f"{file.stat().st_ino} sub/file", f"{foreign.stat().st_ino} sub"),
            *(f"{file.stat().st_ino} psm_mine", f"{file.stat().st_ino} ../x", "0 .", "0 .."),
        ]
        content = [
            item.encode(errors="replace") if isinstance(item, str) else item for item in lines
        ]
        with OwnedDirectory(Path(parent)) as own:
            (own.path / BELONGINGS).write_bytes(b"\n".join([*content, *map(str.encode, shown)]))
        assert file.exists()
        assert mine.exists()
        assert not own.path.exists()
