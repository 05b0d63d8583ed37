"""Makes the model and data of the calculator agent: an untrained model, and arithmetic problems.

    python scripts/make_calculator.py runs/calculator --seed 0

Half of the problems are additions of two digits, which a small model memorises. The other half are
products of three-digit numbers, which it cannot learn. sft.jsonl mostly answers at once; a quarter
of its products call the calculator, every fifth call with a wrong digit. train.jsonl and
held_out.jsonl have prompts with the right answer only. No product is in two files; there are only a
hundred additions.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from make_arithmetic import MODEL, PRINTABLE, make_parser, write_rows, write_untrained
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxrl.environments import load_tools
from jaxrl.environments.tools.builtin import calculator

SIZES = {"sft": 16_000, "train": 2_000, "held_out": 400}
CALLS = {"+": 0.02, "*": 0.25}  # share of problems that sft.jsonl gives to the calculator
SLIPS = 0.2  # share of these calls with a wrong digit
SPECIAL = (
    "<|pad|>",
    "<|end|>",
    "<|tools|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|unknown|>",
)
ADDED = ("<tool_call>", "</tool_call>")
# Of the tools, the prompt shows the names.
TEMPLATE = (
    "{% if tools %}<|tools|>{{ tools | map(attribute='function.name') | join(',') }}{% endif %}"
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = [tool.schema for tool in load_tools(["calculator"]).values()]


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    directory, seed = arguments.directory, arguments.seed
    write_model(directory / "untrained", MODEL, seed=seed)
    write_texts(directory, SIZES, rng=random.Random(seed))


def write_model(directory: Path, model: dict, *, seed: int) -> None:
    """Writes a Hugging Face checkpoint with random weights and a tokenizer that has merged the
    parts of a tool call and splits digits."""
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
        token["special"] = token["content"] in SPECIAL  # calls stay text for the tools to parse
    write_untrained(
        directory,
        model,
        json.dumps(added),
        vocab_size=tokenizer.get_vocab_size(),
        seed=seed,
        template=TEMPLATE,
    )


def write_texts(directory: Path, sizes: dict[str, int], *, rng: random.Random) -> None:
    """Writes the three files, with equal parts of additions and products."""
    small = [f"{a}+{b}" for a in range(10) for b in range(10)]
    pairs = rng.sample(range(900 * 900), sum(sizes.values()))
    large = iter(f"{100 + n // 900}*{100 + n % 900}" for n in pairs)
    for name, size in sizes.items():
        rows: list[dict] = []
        for i in range(size):
            total = rng.choice(small) if i % 2 else next(large)
            if name == "sft":
                rows += (row | {"tools": TOOLS} for row in student(total, rng=rng))
            else:
                rows.append({"prompt": f"{total}=?", "answer": calculator(total)})
        write_rows(directory / f"{name}.jsonl", rows)


def student(total: str, *, rng: random.Random) -> Iterator[dict]:
    """Yields the answer at once, or a call and then the calculator's answer."""
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
    """Formats a call of the calculator."""
    content = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(content)}</tool_call>"


if __name__ == "__main__":
    main()
