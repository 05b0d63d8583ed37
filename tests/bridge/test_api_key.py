"""The key of servers: given, or made once and found by every command of the same user."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxrl.bridge.servers.api_key import given_key, key_file, known_key, server_key


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("JAXRL_API_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


def test_generated_key_is_found(home: Path) -> None:
    assert known_key() is None
    before = os.umask(0)
    try:
        key = server_key("127.0.0.1")
    finally:
        os.umask(before)
    assert key is not None
    assert len(key) >= 32
    assert known_key() == server_key("localhost") == server_key("::1") == key
    assert key_file().stat().st_mode & 0o777 == 0o600
    assert key_file().parent.stat().st_mode & 0o777 == 0o700
    assert [*home.rglob("*")] == [key_file().parent, key_file()]


def test_a_given_key_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made = server_key("127.0.0.1")
    monkeypatch.setenv("JAXRL_API_KEY", "given")
    assert given_key() == known_key() == server_key("127.0.0.1") == server_key("0.0.0.0") == "given"
    monkeypatch.setenv("JAXRL_API_KEY", "")
    assert known_key() == made


def test_no_key_for_a_reachable_host(home: Path) -> None:
    assert server_key("0.0.0.0") is None
    assert not [*home.iterdir()]


def test_servers_that_start_together_agree() -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: server_key("127.0.0.1"), range(32)))
    assert len(keys) == 1


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"a\nb", b"\xff\xfe", b"a\0b"])
def test_a_damaged_file_is_named(content: bytes) -> None:
    server_key("127.0.0.1")
    key_file().write_bytes(content)
    for look in (known_key, lambda: server_key("127.0.0.1")):
        with pytest.raises(ValueError, match=r"jaxrl/key is not a line of letters"):
            look()


def test_what_is_no_private_file_is_named(home: Path) -> None:
    server_key("127.0.0.1")
    key_file().chmod(0o644)
    with pytest.raises(ValueError, match="jaxrl/key has the mode 0644, so other users may know"):
        known_key()
    key_file().unlink()
    os.mkfifo(key_file(), 0o600)
    with pytest.raises(ValueError, match="jaxrl/key is not a file"):
        known_key()
    key_file().unlink()
    key_file().mkdir()
    with pytest.raises(ValueError, match=r"jaxrl/key cannot be read: .* set JAXRL_API_KEY"):
        known_key()


def test_unwritable_home_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "jaxrl").touch()
    with pytest.raises(ValueError, match=r"jaxrl/key cannot be written: .*; set JAXRL_API_KEY"):
        server_key("127.0.0.1")
    assert known_key() is None
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setattr(Path, "expanduser", raises(RuntimeError("no home")))
    with pytest.raises(ValueError, match=r"no home directory .*; set JAXRL_API_KEY"):
        server_key("127.0.0.1")


def raises(error: Exception):
    def function(*_: object) -> None:
        raise error

    return function


@pytest.mark.parametrize("key", ["a\nb", "a b", "schlüssel", "\x7f"])
def test_unsendable_key_is_named(key: str, monkeypatch) -> None:
    monkeypatch.setenv("JAXRL_API_KEY", key)
    for look in (given_key, known_key, lambda: server_key("0.0.0.0")):
        with pytest.raises(ValueError, match="environment variable JAXRL_API_KEY is not a line"):
            look()
