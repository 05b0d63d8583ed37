"""A process of a fleet, with an actor of this process, which needs no Ray."""

import asyncio
import sys

from jaxrl.fleet.child import Child

LEAVES = """#!/bin/sh
sleep 999 &
echo said
exit 3
"""


def test_what_a_process_leaves_behind_does_not_hold_up_its_end(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text(LEAVES)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    made = Child(str(tmp_path), {})
    assert asyncio.run(asyncio.wait_for(made.run([], str(tmp_path / "log")), 60)) == 3
    assert (tmp_path / "log.out").read_text() == "said\n"
