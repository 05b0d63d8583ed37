"""Stop texts: both matchers against the decoded text, and completions that end in one."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from jaxrl.models.model import decoder
from jaxrl.sampling.base import SamplingParams
from jaxrl.sampling.embedded.sampler import EmbeddedSampler
from jaxrl.sampling.embedded.stopping import advance, make_stops, no_ending
from jaxrl.sampling.stop_texts import StopTexts, token_bytes
from tests import published, tiny
from tests.models.test_nnx import NnxConfig

NAMES = ("qwen3", "gemma3", "llama3_1", "deepseek_v3", "gptoss")
LONGEST = 40
# One begins another; one is longer than any token.
TEXTS = (
    "</a>",
    "</ans",
    "</answer>",
    "```",
    "\n\n",
    " Ωé日",
    "🙂",
    "the end of this line of words;",
)


@functools.cache
def loaded(name: str):
    tokenizer = published.tokenizer(name)
    special = tokenizer.eos_token
    return tokenizer, StopTexts(tokenizer, (*TEXTS, special))


@jax.jit
def on_device(tokens: jax.Array, stops) -> jax.Array:
    """Whether the completion of each beginning of i32[N] ends, bool[N]."""

    def step(ending, token):
        return advance(ending, token[None], stops)

    start = jax.tree.map(jnp.asarray, no_ending(1, stops))
    return jax.lax.scan(step, start, tokens)[1][:, 0]


def both_ends(texts: StopTexts, tokens: list[int]) -> set[int | None]:
    """Where the two matchers end a completion."""
    stops = make_stops(SamplingParams(max_tokens=1, stop_texts=texts))
    ended = np.asarray(on_device(np.resize(np.array(tokens), LONGEST), stops))[: len(tokens)]
    return {texts.end(tokens), int(np.argmax(ended)) + 1 if ended.any() else None}


def decoded_end(tokenizer, texts, tokens: list[int]) -> int | None:
    """The first beginning whose decoded text has a stop text in it."""
    beginnings = (tokens[:n] for n in range(1, len(tokens) + 1))
    said = (tokenizer.decode(b, skip_special_tokens=False) for b in beginnings)
    return next((n for n, one in enumerate(said, 1) if any(t in one for t in texts)), None)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_matchers_end_where_the_decoded_text_has_a_stop_text(name, data):
    tokenizer, texts = loaded(name)
    # SentencePiece's first 300 have single bytes, which decode otherwise where they are no UTF-8.
    any_ids = st.integers(300, len(tokenizer) - 1)
    cut = st.tuples(st.sampled_from(texts.texts), st.integers(0, 12), st.integers(0, 12))
    parts = cut.map(lambda c: c[0][c[1] : len(c[0]) - c[2]]) | st.sampled_from((">\n2", "`", "e"))
    encoded = parts.map(lambda part: tokenizer.encode(part, add_special_tokens=False))
    pieces = data.draw(st.lists(encoded | any_ids.map(lambda i: [i]), min_size=1, max_size=8))
    tokens = list(itertools.chain(*pieces, [300]))[:LONGEST]
    assert both_ends(texts, tokens) == {decoded_end(tokenizer, texts.texts, tokens)}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("text", "said", "kept"),
    [
        ("</a>", "1</a>\n2", "1</a>\n"),
        ("```", "x = 1\n```\n\nIt", "x = 1\n```\n\n"),
        ("\n\n", "Done.\n\nUser", "Done.\n\n"),
    ],
)
def test_a_text_within_a_token_ends_the_completion(name, text, said, kept):
    tokenizer, texts = loaded(name)
    tokens = tokenizer.encode(said, add_special_tokens=False)
    (end,) = both_ends(texts, tokens)
    assert text not in tokenizer.decode(tokens[: end - 1])
    assert text in (ended := tokenizer.decode(tokens[:end]))
    assert kept.startswith(ended)


def made(words: list[str], decode: decoders.Decoder) -> PreTrainedTokenizerFast:
    """A tokenizer of words alone."""
    whole = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    whole.decoder = decode
    return PreTrainedTokenizerFast(tokenizer_object=whole)


SYLLABLES = ["a", "b", "ab", "ba", "bba", "Ã", "©", "aÃ", "©b", "Ġ", "Ċa"]
BYTES = made(SYLLABLES, decoders.ByteLevel())


@settings(max_examples=300, deadline=None)
@given(
    texts=st.lists(st.text("abé \n", min_size=1, max_size=4), min_size=1, max_size=4),
    tokens=st.lists(st.integers(0, len(SYLLABLES)), min_size=1, max_size=12),
)
def test_any_texts_over_any_tokens(texts, tokens):
    """The id after the last token is one that the model has and the tokenizer has not."""
    expected = decoded_end(BYTES, texts, tokens)
    assert StopTexts(BYTES, texts).end(tokens) == expected
    assert StopTexts(BYTES, texts).end([]) is None


def test_a_sentencepiece_word_begins_with_its_space():
    """Its decoder drops the space of a text's first word, but a completion follows a prompt."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    decode = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer = made(["<unk>", "a", "▁a", "<0xC3>", "<0xA9>", "<0x0A>"], decode)
    assert token_bytes(tokenizer) == [b"<unk>", b"a", b" a", b"\xc3", b"\xa9", b"\n"]
    assert StopTexts(tokenizer, [" a"]).end([1, 2, 2]) == 2
    assert StopTexts(tokenizer, ["é"]).end([2, 3, 4, 4]) == 3


@pytest.mark.parametrize("texts", [[], ["x", ""], ["\ud800"]])
def test_texts_that_no_completion_has_are_refused(texts):
    with pytest.raises(ValueError, match=r"stop texts|surrogates"):
        StopTexts(BYTES, texts)


@pytest.mark.parametrize("cached", [True, False])
def test_completions_are_the_same_up_to_the_token_that_completes_a_text(cached):
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("ab"), rng.integers(1, 4))) + "." * (i % 3) for i in range(64)]
    tokenizer = made([f"{word}{i % 10}" for i, word in enumerate(words)], decoders.Fuse())
    texts = StopTexts(tokenizer, ["5a", "5ab3a", ".7"])
    model = tiny.model() if cached else decoder(tiny.CONFIG)._replace(config=NnxConfig(64, 128))
    sampler = EmbeddedSampler(model, tiny.params(), max_batch=8)
    plain = SamplingParams(max_tokens=90, temperature=0.9, stop=((1,),), seed=4)
    prompts = [np.array(p, np.int32) for p in ([5, 6, 7], [9, 15, 5], [30])]

    def sample(params):
        found = sampler.sample(prompts, params, group_size=4)
        return {(c.prompt_index, c.sample_index): c for c in found}

    whole, ended = sample(plain), sample(dataclasses.replace(plain, stop_texts=texts))
    ends = {key: decoded_end(tokenizer, texts.texts, one.tokens) for key, one in whole.items()}
    assert len({*ends.values()}) > 5
    for key, one in ended.items():
        end = ends[key]
        assert one.tokens.tolist() == whole[key].tokens[:end].tolist()
        np.testing.assert_allclose(one.logprobs, whole[key].logprobs[:end], atol=1e-5)
        assert one.finish_reason == ("stop" if end else whole[key].finish_reason)
