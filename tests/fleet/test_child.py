"""A process of a fleet, with an actor of this process, which needs no Ray."""

import asyncio
import io
import signal
import sys
import time

import pytest

from jaxrl.fleet import child
from jaxrl.fleet.events import followed

LEAVES = """#!/bin/sh
sleep 999 &
echo said
exit 3
"""


@pytest.fixture
def of_program(tmp_path, monkeypatch):
    """Makes actors whose process is a shell program instead of Python."""

    def make(text):
        program = tmp_path / "python"
        program.write_text(text)
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        # An actor has no JAX. Here a Python function after the fork could wait for its threads'
        # locks.
        monkeypatch.setattr(child, "_ending_with_parent", lambda: None)
        return child.Child(str(tmp_path), {})

    return make


def test_what_a_process_leaves_behind_does_not_hold_up_its_end(tmp_path, of_program):
    made = of_program(LEAVES)
    assert asyncio.run(asyncio.wait_for(made.run([], str(tmp_path / "log")), 60)) == 3
    assert (tmp_path / "log.out").read_text() == "said\n"


def test_a_signal_before_the_process_begins_ends_it(tmp_path, of_program):
    made = of_program("#!/bin/sh\nexec sleep 999\n")

    async def both():
        sending = asyncio.create_task(made.send(signal.SIGTERM))
        await asyncio.sleep(0)
        status = await made.run([], str(tmp_path / "log"))
        await sending
        return status

    assert asyncio.run(asyncio.wait_for(both(), 60)) == -signal.SIGTERM


def test_a_character_that_is_written_in_two_parts_is_shown_as_one(tmp_path):
    shown, path = io.StringIO(), tmp_path / "log"
    with followed(path, shown), path.open("ab", buffering=0) as log:
        text = "loss ↓".encode()
        log.write(text[:-1])
        while not shown.getvalue():
            time.sleep(0.01)
        log.write(text[-1:])
    assert shown.getvalue() == "loss ↓"
