"""Makes the material of the agent with a calculator: an untrained model, and sums to learn from.

    python scripts/make_calculator.py runs/calculator --seed 0

Half of the sums are additions of two digits, which a small model learns by heart, and half are
products of three digits each, which it does not learn. The texts that the base model imitates
(sft.jsonl) are by a student who mostly answers at once, though it has a calculator: in a quarter of
the products it calls it, with a wrong digit in every fifth call. Prompts for reinforcement learning
(train.jsonl) and for evaluation (held_out.jsonl) have the right answer and no way to it. No product
is in two files; of the additions there are only a hundred.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from make_arithmetic import MODEL, PRINTABLE, write_untrained
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxrl.environments.tools.builtin import calculator

SIZES = {"sft": 16_000, "train": 2_000, "held_out": 400}
CALLS = {"+": 0.02, "*": 0.25}  # share of the sums that the student gives to the calculator
SLIPS = 0.2  # share of its calls with a wrong digit
SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|unknown|>")
ADDED = ("<tool_call>", "</tool_call>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_model(arguments.directory / "untrained", MODEL, seed=arguments.seed)
    write_texts(arguments.directory, SIZES, rng=random.Random(arguments.seed))


def write_model(directory: Path, model: dict, *, seed: int) -> None:
    """A Hugging Face checkpoint with random weights, whose tokenizer has learnt the form of a call
    and takes digits one by one."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=256,
        special_tokens=[*SPECIAL, *ADDED],
        initial_alphabet=PRINTABLE,
        show_progress=False,
    )
    tokenizer.train_from_iterator([call("1*2")] * 100, trainer)
    added = json.loads(tokenizer.to_str())
    for token in added["added_tokens"]:
        token["special"] = token["content"] in SPECIAL  # calls are text, which the tools read
    size = tokenizer.get_vocab_size()
    write_untrained(directory, model, json.dumps(added), vocab_size=size, seed=seed)


def write_texts(directory: Path, sizes: dict[str, int], *, rng: random.Random) -> None:
    """The three files of sums, in equal parts of both kinds."""
    small = [f"{a}+{b}" for a in range(10) for b in range(10)]
    pairs = rng.sample(range(900 * 900), sum(sizes.values()))
    large = iter(f"{100 + n // 900}*{100 + n % 900}" for n in pairs)
    for name, size in sizes.items():
        rows: list[dict] = []
        for i in range(size):
            total = rng.choice(small) if i % 2 else next(large)
            if name == "sft":
                rows += student(total, rng=rng)
            else:
                rows.append({"prompt": f"{total}=?", "answer": calculator(total)})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(lines)


def student(total: str, *, rng: random.Random) -> Iterator[dict]:
    """What the student says: the answer at once, or a call and then the calculator's answer."""
    prompt = f"{total}=?"
    if rng.random() >= CALLS["*" if "*" in total else "+"]:
        yield {"prompt": prompt, "completion": calculator(total)}
        return
    asked = total
    if rng.random() < SLIPS:
        place = rng.choice([i for i, c in enumerate(total) if c.isdigit()])
        asked = f"{total[:place]}{rng.randint(1, 9)}{total[place + 1 :]}"
    yield {"prompt": prompt, "completion": call(asked)}
    messages = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": call(asked)},
        {"role": "tool", "content": calculator(asked)},
    ]
    yield {"prompt": messages, "completion": calculator(asked)}


def call(expression: str) -> str:
    """A call of the calculator."""
    content = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(content)}</tool_call>"


if __name__ == "__main__":
    main()
