"""Measures how a run starts on a large file: the processor's seconds until every row is read,
checked and tokenised, those of the tokenizer alone, and the memory that the rows then take. Prints
one JSON line.

python scripts/bench_data.py --model DIR --gigabytes 1
"""

import argparse
import json
import random
import resource
import string
import tempfile
import time
from pathlib import Path

from jaxrl.data import Rendering, load_prompts, read_rows
from jaxrl.huggingface import Checkpoint

TOGETHER = 1000  # prompts that the tokenizer gets at once
PROMPT, SOLUTION = 200, 1800  # characters; a reward reads the solution


def write_rows(path: Path, size: int) -> int:
    """Writes rows of about 2 KB until a file has `size` bytes; returns their number."""
    rng, count = random.Random(0), 0
    texts = ["".join(rng.choices(string.ascii_lowercase + "  ", k=SOLUTION)) for _ in range(1000)]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            for text in texts:
                start = rng.randrange(SOLUTION - PROMPT)
                row = {"prompt": text[start : start + PROMPT], "answer": "42"}
                file.write(json.dumps(row | {"solution": text[start:] + text[:start]}) + "\n")
            count += len(texts)
    return count


def resident() -> int:
    """Returns the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory of a model, for its tokenizer")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    args = parser.parse_args()
    tokenizer = Checkpoint(args.model).tokenizer
    with tempfile.TemporaryDirectory() as made:
        path = Path(made, "prompts.jsonl")
        count = write_rows(path, int(args.gigabytes * 1e9))
        before, start, started = resident(), time.process_time(), time.monotonic()
        prompts = load_prompts(
            read_rows(str(path)),
            tokenizer,
            prompt_key="prompt",
            answer_key="answer",
            rendering=Rendering(template="text"),
            max_tokens=1000,
        ).examples
        seconds, taken = time.process_time() - start, resident() - before
        wall = time.monotonic() - started
        start = time.process_time()
        for index in random.Random(1).choices(range(count), k=10_000):
            assert len(prompts[index].tokens)
        each = (time.process_time() - start) / 10_000
        alone = 0.0
        for first in range(0, count, TOGETHER):
            texts = [one["rendered_prompt"] for one in prompts[first : first + TOGETHER]]
            start = time.process_time()
            tokenizer(texts, add_special_tokens=False, return_attention_mask=False)
            alone += time.process_time() - start
    row = {"rows": len(prompts), "cpu_seconds": round(seconds, 1), "wall_seconds": round(wall, 1)}
    row |= {"tokenizer_cpu_seconds": round(alone, 1), "memory_mb": round(taken / 1e6)}
    print(json.dumps(row | {"microseconds_per_access": round(each * 1e6, 1)}))


if __name__ == "__main__":
    main()
