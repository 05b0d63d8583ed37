"""Makes the quickstart's model and data: a tokenizer, an untrained model and additions.

    python scripts/make_arithmetic.py runs/quickstart --seed 0

sft.jsonl has worked additions in which most carries were deliberately dropped. train.jsonl and
held_out.jsonl have prompts with the right answer only. No addition is in two files.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from jaxrl import huggingface
from jaxrl.huggingface import from_hf_config
from jaxrl.models import init, param_specs

SIZES = {"sft": 20_000, "train": 4_000, "held_out": 400}
FORGETS = 0.65  # share of carries that are dropped
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "initializer_range": 0.1,  # 0.02, meant for wide models, trains five times slower here
}
# For tests and for loops that disturb runs.
TINY = MODEL | {
    "hidden_size": 32,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
}
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|unknown|>")
PRINTABLE = ["\n", *map(chr, range(32, 127))]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}"
    "{% if message.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--head_dim", type=int, default=MODEL["head_dim"])
    arguments = parser.parse_args()
    model = MODEL | {"head_dim": arguments.head_dim}
    write_model(arguments.directory / "untrained", model, seed=arguments.seed)
    write_texts(arguments.directory, SIZES, rng=random.Random(arguments.seed))


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Builds the parser of a directory and a seed."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def write_model(directory: Path, model: dict, *, seed: int) -> None:
    """Writes a Hugging Face checkpoint with random weights and a character tokenizer."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *PRINTABLE))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[-1]))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    write_untrained(
        directory, model, tokenizer.to_str(pretty=True), vocab_size=len(vocabulary), seed=seed
    )


def write_untrained(
    directory: Path,
    model: dict,
    tokenizer: str,
    *,
    vocab_size: int,
    seed: int,
    template: str = TEMPLATE,
) -> None:
    """Writes a Hugging Face checkpoint with random weights. `model` is config.json without the
    vocabulary, `tokenizer` is tokenizer.json, with <|pad|> as 0 and <|end|> as 1."""
    ids = {"vocab_size": vocab_size, "pad_token_id": 0, "eos_token_id": 1}
    config = from_hf_config(model | ids)
    f32 = jnp.dtype(jnp.float32)
    params = init(param_specs(config), jax.random.key(seed), dtype=f32)
    huggingface.save(directory, params, config, dtype=f32)
    (directory / "tokenizer.json").write_text(tokenizer)
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "unk_token": SPECIAL[-1],
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")


def write_texts(directory: Path, sizes: dict[str, int], *, rng: random.Random) -> None:
    """Writes the three files of additions."""
    pairs = iter(rng.sample(range(900 * 900), sum(sizes.values())))
    for name, size in sizes.items():
        rows = []
        for _ in range(size):
            a, b = (100 + digits for digits in divmod(next(pairs), 900))
            prompt = f"{a}+{b}=?"
            if name == "sft":
                rows.append({"prompt": prompt, "completion": student(a, b, rng=rng)})
            else:
                rows.append({"prompt": prompt, "answer": str(a + b)})
        write_rows(directory / f"{name}.jsonl", rows)


def write_rows(path: Path, rows: Iterable[dict]) -> None:
    """Writes JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def student(a: int, b: int, *, rng: random.Random) -> str:
    """Works out an addition and drops most carries."""
    return worked(a, b, carries=lambda total: total > 9 and rng.random() >= FORGETS)


def worked(a: int, b: int, *, carries: Callable[[int], bool]) -> str:
    """Adds from the right: 347 + 585 is "7+5=12 4+8+1=13 3+5+1=9 932" with every carry and
    "7+5=12 4+8=12 3+5=8 822" without. `carries` decides from the sum of a column."""
    steps, digits, carry = [], "", False
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        digits = (str(total) if len(steps) == 3 else str(total)[-1]) + digits
        carry = carries(total)
    return f"{' '.join(steps)} {digits}"


if __name__ == "__main__":
    main()
