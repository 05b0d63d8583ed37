"""The end of a turn in templates of all shapes, and what is made of it."""

import asyncio

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl.data.ends import TurnEnd, completion_encoder, end_note, turn_end
from jaxrl.data.prompts import Example, Rendering, prompt_encoder, start_tokens
from jaxrl.environments.episodes.chat import Chat
from jaxrl.environments.episodes.text_game import TextGame

CONTROL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>", "<|return|>"]
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
LAST = "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
LATER = "{% if not loop.last or add_generation_prompt %}<|end|>{% endif %}"


def template(end: str, prompt: str = PROMPT) -> str:
    """A template with this end of a message."""
    turn = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    return turn + end + "{% endfor %}" + prompt


TEMPLATES = {
    "token": (template("<|end|>"), "<|end|>"),
    "newline behind": (template("{{ '<|end|>\n' }}"), "<|end|>"),
    "space before": (template(" </s>"), " </s>"),
    "prompt always": (template("<|end|>", "<|assistant|>"), "<|end|>"),
    "another one last": (template(LAST), "<|return|>"),
    "none last": (template(LATER), "<|end|>"),
    "none": (template(""), None),
    "none, prompt always": (template("", "<|assistant|>"), None),
    "a line": (template("{{ '\n\n' }}"), None),
    "words dropped": ("{% for m in messages %}<|end|>{% endfor %}", None),
    "fails": ("{{ raise_exception('no') }}", None),
    "missing": ("", None),
}


def tokenizer(written: str) -> PreTrainedTokenizerFast:
    """Single bytes, with <s> before and </s> after a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Tokenizer(models.BPE({name: i for i, name in enumerate(alphabet)}, []))
    base.add_special_tokens(CONTROL)
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    ids = {name: base.token_to_id(name) for name in ("<s>", "</s>")}
    base.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[*ids.items()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=base, bos_token="<s>", eos_token="</s>", chat_template=written
    )


def ids(text: str, of: PreTrainedTokenizerFast) -> list[int]:
    return of.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(("written", "end"), TEMPLATES.values(), ids=TEMPLATES)
def test_completions_end_as_the_template_ends_a_turn(written, end):
    tokens = tokenizer(written)
    found = None if end is None else TurnEnd(end, ids(end.strip(), tokens)[0])
    assert turn_end(tokens) == found
    assert completion_encoder(tokens, Rendering())("7") == ids("7" + (end or "</s>"), tokens)
    note = end_note(tokens, Rendering())
    assert (note is None) == (end is None or end.strip() == "</s>")
    if note is not None:
        assert f" {end}, which" in note
        assert note.endswith("eos_token is </s>")


def test_only_what_stands_before_a_text_is_added():
    tokens = tokenizer("")
    assert tokens.decode(tokens.encode("7")) == "<s>7</s>"
    assert tokens.decode(start_tokens(tokens)) == "<s>"
    encode, finish = (f(tokens, Rendering()) for f in (prompt_encoder, completion_encoder))
    assert [tokens.decode(encode(text)) for text in ("7", "<s>7", "")] == ["<s>7", "<s>7", "<s>"]
    assert [tokens.decode(finish(text)) for text in ("7", "7</s>")] == ["7</s>", "7</s>"]
    tokens.eos_token = None
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        completion_encoder(tokens, Rendering())


def test_an_episode_appends_what_follows_the_end():
    for name in ("token", "newline behind", "space before"):
        tokens = tokenizer(TEMPLATES[name][0])
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        turns.append({"role": "user", "content": "c"})
        whole = tokens.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        end = TEMPLATES[name][1]
        before, _, after = whole.partition(f"b{end}")
        seen = Chat(tokens).user_message("c", after=np.array(ids(f"b{end}", tokens)))
        assert tokens.decode(seen) == after, (name, before)


@pytest.mark.parametrize(("start", "read"), [("<s>", "<s>Play: go!"), ("", "Play: go!")])
def test_a_games_prompt_keeps_the_tokens_in_front(start, read):
    class Game:
        def reset(self):
            return "go"

    tokens = tokenizer(TEMPLATES["token"][0])
    prompt = "Play: {observation}!"
    example = Example(np.array(ids(start + prompt, tokens)), {"rendered_prompt": prompt}, {})
    observed = asyncio.run(TextGame(Chat(tokens), Game()).reset(example))
    assert tokens.decode(observed) == read
