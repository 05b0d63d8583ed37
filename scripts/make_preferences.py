"""Makes pairs of worked additions, a right one and a wrong one, for the quickstart's model.

    python scripts/make_preferences.py runs/quickstart --seed 0

Writes pairs.jsonl and pairs_held_out.jsonl next to what make_arithmetic.py wrote. Wrong answers
forget carries, as the quickstart's student does, or imagine some, so that more carries are not
simply better. No addition is in another file.
"""

import argparse
import json
import random
from pathlib import Path

SIZES = {"pairs": 8_000, "pairs_held_out": 400}
# Chances to forget a carry and to imagine one, at each digit of a wrong answer.
FORGETS, IMAGINES = (0.65, 0.0), (0.0, 0.4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_pairs(arguments.directory, SIZES, rng=random.Random(arguments.seed))


def write_pairs(directory: Path, sizes: dict[str, int], *, rng: random.Random) -> None:
    """A file of pairs for each size; the additions are new to the directory."""
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
            right = worked(a, b, chances=(0, 0), rng=rng)
            rows.append({"prompt": prompt, "chosen": right, "rejected": wrong(a, b, rng=rng)})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(lines)


def wrong(a: int, b: int, *, rng: random.Random) -> str:
    """A worked addition with a wrong result."""
    while True:
        text = worked(a, b, chances=rng.choice((FORGETS, IMAGINES)), rng=rng)
        if int(text.split()[-1]) != a + b:
            return text


def worked(a: int, b: int, *, chances: tuple[float, float], rng: random.Random) -> str:
    """Adds from the right as the student of make_arithmetic.py writes it."""
    forgets, imagines = chances
    steps, digits, carry = [], "", False
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        digits = (str(total) if len(steps) == 3 else str(total)[-1]) + digits
        carry = rng.random() >= forgets if total > 9 else rng.random() < imagines
    return f"{' '.join(steps)} {digits}"


if __name__ == "__main__":
    main()
