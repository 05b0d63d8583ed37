import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl.tracking.samples import token_texts

WORDS = ["▁The", "▁answer", "▁is", "▁4", "▁", "a", "b", "."]


def llama_style():
    """Builds a tokenizer like Llama 2's: "▁" for spaces, bytes for unknown characters."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    vocab = {word: i for i, word in enumerate(["<unk>", *bytes_, *WORDS])}
    made = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made)


def gpt_style():
    """Builds a tokenizer like GPT-2's: a token is one byte, or two frequent neighbours."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ġ", "a"), ("â", "Ĥ"), ("¬", "â")]  # the second and third cut characters
    vocab = {token: i for i, token in enumerate([*letters, *(a + b for a, b in pairs)])}
    made = Tokenizer(models.BPE(vocab, pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


TOKENIZERS = {"llama": llama_style(), "gpt": gpt_style()}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def test_spaces_are_kept_and_characters_are_whole():
    tokenizer = TOKENIZERS["llama"]
    words = ["▁The", "▁answer", "▁is", "▁4", "<0xE2>", "<0x82>", "<0xAC>", "."]
    ids = tokenizer.convert_tokens_to_ids(words)
    assert token_texts(tokenizer, ids) == ["The", " answer", " is", " 4", "", "", "€", "."]
    tokenizer = TOKENIZERS["gpt"]
    ids = tokenizer.convert_tokens_to_ids(["a", "Ġa", "âĤ", "¬", "â", "Ĥ", "¬â", "Ĥ", "¬"])
    assert token_texts(tokenizer, ids) == ["a", " a", "", "€", "", "", "", "", "€€"]


@every_tokenizer
@given(text=st.text(alphabet="ab. 4€é漢😀\n", max_size=40))
def test_joined_token_texts_equal_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    found = token_texts(tokenizer, ids)
    assert len(found) == len(ids)
    assert "".join(found) == tokenizer.decode(ids)


@every_tokenizer
def test_invalid_text_takes_linear_time(tokenizer):
    looked_at = 0

    class Counting:
        def decode(self, ids, *, skip_special_tokens):
            nonlocal looked_at
            looked_at += len(ids)
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    letters = tokenizer.convert_tokens_to_ids(["<0x80>", "Ģ"])  # a byte that begins nothing
    bad = next(i for i in letters if i is not None and tokenizer.decode([i]) == "\ufffd")
    costs = []
    for size in (500, 1000):
        looked_at = 0
        assert "".join(token_texts(Counting(), [bad] * size)).count("\ufffd") == size
        costs.append(looked_at)
    assert costs[1] < 2.2 * costs[0]
