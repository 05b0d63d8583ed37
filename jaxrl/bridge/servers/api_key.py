"""The key of vLLM servers: from the environment, or made once for each user."""

import contextlib
import os
import secrets
import stat
from pathlib import Path

from jaxrl.bridge.in_vllm.auth import KEY
from jaxrl.bridge.servers.launch import is_loopback


def given_key() -> str | None:
    """Returns the environment variable JAXRL_API_KEY, None if it is not set or empty; raises
    ValueError if it cannot be sent in a request."""
    key = os.environ.get(KEY)
    return _checked(key, where=f"the environment variable {KEY}") if key else None


def known_key() -> str | None:
    """Returns the key of running servers: the given one, else the one in the user's key file, else
    None; raises ValueError if it cannot be sent in a request, or others can read the file."""
    if key := given_key():
        return key
    file = key_file()
    try:
        # A FIFO would block.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb") as stream:
            mode, content = os.fstat(stream.fileno()).st_mode, stream.read(1000) or b""
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}; set {KEY}") from None
    if not stat.S_ISREG(mode):
        raise ValueError(f"{file} is not a file; remove it, or set {KEY}")
    if mode & 0o077:
        raise ValueError(
            f"{file} has the mode {stat.S_IMODE(mode):04o}, so other users may know the key; "
            f"remove the file and restart the servers, or set {KEY}"
        )
    return _checked(content.decode(errors="replace").strip(), where=str(file))


def server_key(host: str) -> str | None:
    """Returns the key of a server that listens on `host`; makes the user's key file if needed.

    Raises ValueError as `known_key`, or if the file cannot be written.
    """
    if not is_loopback(host):  # learners on other machines would not find the file
        return given_key()
    if (key := known_key()) is not None:
        return key
    file = key_file()
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.callback(draft.unlink, missing_ok=True)
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                stream.write(secrets.token_hex(16) + "\n")
            with contextlib.suppress(FileExistsError):  # another server was faster
                os.link(draft, file)
    except OSError as error:
        raise ValueError(
            f"{file} cannot be written: {error.strerror}; set {KEY} to a secret, here and where "
            "the learner runs"
        ) from None
    return known_key()


def key_file() -> Path:
    """Returns the place of the user's key file; raises ValueError if the user has no home."""
    configs = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    try:
        return configs.expanduser() / "jaxrl" / "key"
    except RuntimeError:
        raise ValueError(f"there is no home directory for a key; set {KEY} to a secret") from None


def _checked(key: str, *, where: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(f"the key in {where} is not a line of letters, digits and punctuation")
    return key
