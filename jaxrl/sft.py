"""Supervised fine-tuning: token cross-entropy over completion tokens, packed.

The learner is the one of reinforcement learning; the objective is -logprob, without advantages.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import data, parts, precision
from jaxrl.batch import Rollout, TokenBatch, assign_rows, pack
from jaxrl.data import Row, Tokenizer
from jaxrl.interrupt import Interrupt
from jaxrl.learner import Minibatch, interleave, make_learner
from jaxrl.losses.aggregation import token_mean
from jaxrl.losses.algebra import Scores, TokenLoss, objective, token_loss
from jaxrl.metrics import Metrics, to_floats
from jaxrl.models import huggingface
from jaxrl.sft_config import SFTConfig, SFTDataConfig
from jaxrl.tracking import open_tracker

_LOG_EVERY = 10  # steps between two looks at the loss, each of which waits for the device


class Texts(NamedTuple):
    """Tokenised texts.

    Attributes:
      sequences: what is learnt; `completion` ends with the end-of-sequence token.
      too_long: number of texts that were left out.
    """

    sequences: Sequence[Rollout]
    too_long: int


class Result(NamedTuple):
    """How a run ended.

    Attributes:
      step: optimizer steps taken.
      signum: the signal that ended it early, or None.
      loss: of the last logged step, nats per token.
      model: directory of the tuned model; None if the run was ended early.
    """

    step: int
    signum: int | None
    loss: float
    model: Path | None


def cross_entropy() -> TokenLoss:
    """-log p of each completion token, nats."""

    def apply(scores: Scores, batch: TokenBatch) -> tuple[jax.Array, Metrics]:
        del batch
        return -scores.logprobs, {}

    return token_loss(apply)


def finetune(config: SFTConfig) -> Result:
    """Trains for `config.train.steps` steps, or until a signal comes, and saves the model.

    Raises:
      ValueError: for data, a model or a run directory that cannot be used; the message names it.
    """
    policy = precision.parse(config.precision)
    layout = parts.make_layout(config.mesh)
    tokenizer = huggingface.load_tokenizer(config.model.path)
    texts = load_texts(config.data, tokenizer, max_tokens=config.train.row_length)
    model, params = parts.load_model(
        config.model.path, layout=layout, dtype=policy.params, remat=config.train.remat
    )
    optimizer = parts.make_optimizer(
        config.optimizer, total_steps=config.train.steps, specs=model.specs
    )
    learner = make_learner(
        model,
        objective(cross_entropy(), token_mean),
        optimizer=optimizer.transformation,
        precision=policy,
        rows_per_microbatch=config.microbatch_rows,
        param_shardings=layout.tree(model.specs) if layout.mesh.size > 1 else None,
    )
    shardings = layout.state(jax.eval_shape(learner.init, params), model.specs)
    state = jax.jit(learner.init, out_shardings=shardings)(params)
    update = jax.jit(learner.step, donate_argnums=0, out_shardings=(shardings, None))
    place = layout.batch(("batch", "length"))

    directory, steps = Path(config.run_dir), config.train.steps
    step, loss, since, tokens = 0, float("nan"), time.perf_counter(), 0
    with (
        Interrupt() as interrupt,
        open_tracker(directory, start_step=0, total_steps=steps, title="sft") as tracker,
    ):
        if texts.too_long:
            tracker.note(
                f"{texts.too_long} texts have more than train.row_length = "
                f"{config.train.row_length} tokens and are left out"
            )
        while step < steps and interrupt.signum is None:
            batch, used = _batch(texts.sequences, step=step, config=config)
            tokens += int(np.count_nonzero(batch.segments))
            minibatch = Minibatch(batch=jax.device_put(batch, place), microbatches=jnp.int32(used))
            state, metrics = update(state, minibatch)
            step += 1
            if step % _LOG_EVERY == 0 or step == steps:
                numbers = to_floats(metrics)
                now = time.perf_counter()
                loss = numbers["loss"]
                numbers["tokens_per_second"] = tokens / (now - since)
                numbers["learning_rate"] = float(np.asarray(optimizer.learning_rate(step - 1)))
                tracker.log(step, numbers)
                since, tokens = now, 0
    if interrupt.signum is not None:
        return Result(step, interrupt.signum, loss, None)
    huggingface.save(
        directory / "model",
        state.params,
        model.config,
        dtype=policy.params,
        source_dir=config.model.path,
    )
    return Result(step, None, loss, directory / "model")


def load_texts(config: SFTDataConfig, tokenizer: Tokenizer, *, max_tokens: int) -> Texts:
    """Reads and tokenises what is learnt.

    Prompt and completion are tokenised each for itself, as in sampling, where the prompt is given.

    Raises:
      ValueError: for a row without a key, a tokenizer without an end-of-sequence token, or if no
        text is left; the message names file, line and key.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError("the model's tokenizer has no end-of-sequence token, so no text could end")
    render = data.renderer(tokenizer, parts.rendering(config))

    def split(row: Row) -> tuple[list[int], list[int]]:
        where, record = row
        if config.text_key is not None:
            text = data.column(record, config.text_key, where=where)
            tokens = tokenizer.encode(text, add_special_tokens=False)
            return tokens[:1], tokens[1:]
        prompt = render(data.prompt_of(record, config.prompt_key, where=where), where=where)
        completion = data.column(record, config.completion_key, where=where)
        return (
            tokenizer.encode(prompt, add_special_tokens=False),
            tokenizer.encode(completion, add_special_tokens=False),
        )

    sequences = []
    for row in data.read_rows(config.path, split=config.split, subset=config.subset):
        prompt, completion = split(row)
        if not prompt:
            raise ValueError(f"{row.where}: the text begins with no token to predict from")
        sequences.append(_sequence(prompt, [*completion, end]))
    short = [one for one in sequences if one.length <= max_tokens]
    if not short:
        raise ValueError(
            f"{config.path}: no text to learn; {len(sequences)} have more than {max_tokens} tokens"
        )
    return Texts(short, len(sequences) - len(short))


def _sequence(prompt: Sequence[int], completion: Sequence[int]) -> Rollout:
    size = len(completion)
    return Rollout(
        prompt=np.asarray(prompt, np.int32),
        completion=np.asarray(completion, np.int32),
        logprobs=np.full(size, np.nan, np.float32),
        action_mask=np.ones(size, bool),
        version=np.zeros(size, np.int32),
        group=0,
    )


def _batch(sequences: Sequence[Rollout], *, step: int, config: SFTConfig) -> tuple[TokenBatch, int]:
    """The sequences of a step, on the host, and the number of microbatches that they fill."""
    size, c = config.train.batch_size, config.train
    chosen = data.take(len(sequences), position=step * size, count=size, seed=config.seed)
    batch = [sequences[i] for i in chosen]
    if c.packing:
        rows = assign_rows([one.length for one in batch], row_length=c.row_length)
    else:
        rows = [[i] for i in range(size)]
    placed, used = interleave(
        rows,
        rows_per_microbatch=config.microbatch_rows,
        max_microbatches=-(-size // config.microbatch_rows),
    )
    return pack(batch, [0.0] * size, rows=placed, row_length=c.row_length), used
