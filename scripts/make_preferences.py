"""Makes preference pairs of worked additions, one right and one wrong, for the quickstart's model.

    python scripts/make_preferences.py runs/quickstart --seed 0
    python scripts/make_preferences.py runs/quickstart --mistakes runs/quickstart/mistakes.jsonl

Writes pairs.jsonl and pairs_held_out.jsonl next to the files of make_arithmetic.py. Wrong
completions drop carries, like sft.jsonl, or add false ones, so that more carries are not simply
better. No addition is in another file.

With --mistakes it writes more_pairs.jsonl instead: the pairs of pairs.jsonl, and one for each wrong
completion in the file that `jaxrl eval --completions` wrote.
"""

import json
import random
from pathlib import Path
from typing import Any

from make_arithmetic import make_parser, worked, write_rows

SIZES = {"pairs": 8_000, "pairs_held_out": 400}
# Chances to drop a carry and to add a false one, at each digit of a wrong completion.
FORGETS, IMAGINES = (0.65, 0.0), (0.0, 0.4)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--mistakes", type=Path, help="completions with their rewards")
    arguments = parser.parse_args()
    directory, seed = arguments.directory, arguments.seed
    if arguments.mistakes is not None:
        rows = read_rows(directory / "pairs.jsonl") + corrected(read_rows(arguments.mistakes))
        write_rows(directory / "more_pairs.jsonl", rows)
        return
    write_pairs(directory, SIZES, rng=random.Random(seed))


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def corrected(completions: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Pairs each wrong completion with the addition worked out."""
    rows = []
    for row in completions:
        if row["numeric_match"] != 1:
            a, b = map(int, row["prompt"].removesuffix("=?").split("+"))
            right = worked(a, b, carries=lambda total: total > 9)
            rows.append({"prompt": row["prompt"], "chosen": right, "rejected": row["completion"]})
    return rows


def write_pairs(directory: Path, sizes: dict[str, int], *, rng: random.Random) -> None:
    """Writes a file of pairs for each size, with additions that no other file has."""
    seen = {
        row["prompt"]
        for path in sorted(directory.glob("*.jsonl"))
        if path.stem not in (*sizes, "more_pairs")
        for row in read_rows(path)
    }
    for name, size in sizes.items():
        rows = []
        while len(rows) < size:
            a, b = rng.randrange(100, 1000), rng.randrange(100, 1000)
            if (prompt := f"{a}+{b}=?") in seen:
                continue
            seen.add(prompt)
            right = slipped(a, b, chances=(0, 0), rng=rng)
            rows.append({"prompt": prompt, "chosen": right, "rejected": wrong(a, b, rng=rng)})
        write_rows(directory / f"{name}.jsonl", rows)


def wrong(a: int, b: int, *, rng: random.Random) -> str:
    """Works out an addition with a wrong result."""
    while True:
        text = slipped(a, b, chances=rng.choice((FORGETS, IMAGINES)), rng=rng)
        if int(text.split()[-1]) != a + b:
            return text


def slipped(a: int, b: int, *, chances: tuple[float, float], rng: random.Random) -> str:
    """Works out an addition with chances to drop a carry and to add a false one."""
    forgets, imagines = chances

    def carries(total: int) -> bool:
        return rng.random() >= forgets if total > 9 else rng.random() < imagines

    return worked(a, b, carries=carries)


if __name__ == "__main__":
    main()
