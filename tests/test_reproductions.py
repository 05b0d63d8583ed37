"""Quick mode of the reproduction scripts: each asserts the direction of its effect."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import XLA_FLAGS

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("reproduce_phantom_clipping.py", "phantom fraction 0.0000: shadowed"),
        ("reproduce_fp16.py", "bf16 / fp16: "),
    ],
)
def test_quick_mode(script: str, shown: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, "--quick"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": XLA_FLAGS},  # one device
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
