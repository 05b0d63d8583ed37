"""Counts the slots that decode steps read per token held: the batch loop of the embedded sampler,
without a model, for completions of log-normal length.

python scripts/experiments/slots_read.py    # some seconds
"""

import argparse

import numpy as np

from jaxrl.core.buckets import count_bucket, length_bucket
from jaxrl.sampling.embedded import batch_decoding as loop
from jaxrl.sampling.embedded.decode_steps import SEGMENT

PROMPT, LONGEST, MAX_BATCH, PAGE = 256, 3072, 64, 128
# Median length of a completion, sigma of its logarithm, completions of a request.
WORKLOADS = ((600, 0.8, 256), (600, 0.8, 64), (300, 1.0, 256), (1000, 0.5, 256))


def count(lengths: list[int]) -> np.ndarray:
    """Follows `batch_decoding.decode_turns` for completions of these lengths; returns sums over
    decode steps: slots read, tokens held by rows that run, and slots of the pages that hold them.
    """
    waiting, rows = list(lengths), min(count_bucket(len(lengths)), MAX_BATCH)
    limit = np.array([waiting.pop(0) if waiting else 0 for _ in range(rows)])
    done = np.ones_like(limit)
    most = loop.most_slots(PROMPT, LONGEST)
    slots = loop.larger_cache(length_bucket(PROMPT, step=16), holds=1, most=most)
    refilled = loop.refilled_rows(rows, longest=LONGEST, shards=1)
    sums = np.zeros(3, int)
    while (running := done < limit).any():
        due = min(refilled, len(waiting))
        if due and running.sum() <= len(done) - due:
            for row in np.flatnonzero(~running)[:due]:
                limit[row], done[row] = waiting.pop(0), 1
            continue
        if (PROMPT + done - 1)[running].max() >= slots:
            slots = loop.larger_cache(slots, holds=1, most=most)
        fewer = 0 if due else loop.shrunk_rows(len(done), shards=1)
        if running.sum() <= fewer:
            kept = np.flatnonzero(running)
            padding = np.zeros(fewer - len(kept), int)
            done = np.concatenate([done[kept], padding + 1])
            limit = np.concatenate([limit[kept], padding])
            fewer = loop.shrunk_rows(fewer, shards=1)
        floor = len(done) - due if due else fewer
        for _ in range(SEGMENT):
            running, positions = done < limit, PROMPT + done - 1
            if running.sum() <= floor or (running & (positions >= slots)).any():
                break
            held = positions[running] + 1
            sums += (len(done) * slots, held.sum(), (-(-held // PAGE) * PAGE).sum())
            done = done + running
    return sums


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for median, sigma, completions in WORKLOADS:
        drawn = np.random.default_rng(0).lognormal(np.log(median), sigma, completions)
        slots, tokens, in_pages = count([int(n) for n in drawn.clip(1, LONGEST)])
        print(
            f"median {median}, sigma {sigma}, {completions} completions: "
            f"{slots / tokens:.2f} slots read per token held, "
            f"{in_pages / tokens:.2f} in pages of {PAGE}"
        )


if __name__ == "__main__":
    main()
