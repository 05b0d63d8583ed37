"""Quick mode of the reproduction scripts: each asserts the direction of its effect."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.alone  # it uses all cores for half a minute
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("reproduce_phantom_clipping.py", "phantom fraction 0.0000: shadowed"),
        ("reproduce_fp16.py", "bf16 / fp16: "),
    ],
)
def test_quick_mode(script: str, shown: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}  # one device
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / script, "--quick"],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
