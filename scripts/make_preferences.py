"""Makes preference pairs of worked additions, one right and one wrong, for the quickstart's model.

    python scripts/make_preferences.py runs/quickstart --seed 0

Writes pairs.jsonl and pairs_held_out.jsonl next to the files of make_arithmetic.py. Wrong
completions drop carries, like sft.jsonl, or add false ones, so that more carries are not simply
better. No addition is in another file.
"""

import json
import random
from pathlib import Path

from make_arithmetic import make_parser, worked, write_rows

SIZES = {"pairs": 8_000, "pairs_held_out": 400}
# Chances to drop a carry and to add a false one, at each digit of a wrong completion.
FORGETS, IMAGINES = (0.65, 0.0), (0.0, 0.4)


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    directory, seed = arguments.directory, arguments.seed
    write_pairs(directory, SIZES, rng=random.Random(seed))


def write_pairs(directory: Path, sizes: dict[str, int], *, rng: random.Random) -> None:
    """Writes a file of pairs for each size, with additions that no other file has."""
    seen = {
        json.loads(line)["prompt"]
        for path in sorted(directory.glob("*.jsonl"))
        if path.stem not in sizes
        for line in path.read_text().splitlines()
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
