"""Measures the effect of routing replay before any update: one rollout of random mixtures of
experts, scored with and without the sampler's experts.

    python scripts/reproduce_routing_replay.py runs/routing

Takes ten minutes and prints the table of docs/scale.md, Mixtures of experts.
"""

import argparse
from pathlib import Path

from experiments.runs import markdown
from reproduce import routing


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    print(markdown(list(routing.rows(directory))))


if __name__ == "__main__":
    main()
