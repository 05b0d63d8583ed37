import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, strategies as st

from jaxrl.data.prompts import Rendering, load_prompts, next_indices
from jaxrl.data.rows import read_rows
from jaxrl.huggingface import Checkpoint
from tests import tiny


class Letters:
    """A tokenizer of characters with a chat template, which writes ^ before and $ after a text."""

    eos_token_id = 0

    def __init__(self, *, chat_template: str | None = "yes"):
        self.chat_template = chat_template

    def encode(self, text, *, add_special_tokens):
        return [ord(c) for c in (f"^{text}$" if add_special_tokens else text)]

    def get_vocab(self):
        return {chr(i): i for i in range(128)}

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
        assert not tokenize
        assert add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in conversation) + "<assistant>"


AUTO = Rendering()
GSM8K = [
    {"question": "How many?", "answer": "21 * 2 = <<21*2=42>>42\n#### 42"},
    {"question": "And a rather longer question?", "answer": "#### 1,000"},
]


def write(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts(path: str, *, tokenizer=None, rendering=AUTO, **changes):
    keys = {"prompt_key": "question", "answer_key": "answer", "max_tokens": 100} | changes
    return load_prompts(read_rows(path), tokenizer or Letters(), rendering=rendering, **keys)


def test_jsonl_and_parquet_give_the_same_prompts(tmp_path: Path):
    jsonl = prompts(write(tmp_path / "a.jsonl", GSM8K))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(GSM8K), tmp_path / "a.parquet")
    parquet = prompts(str(tmp_path / "a.parquet"))
    for a, b in zip(jsonl.examples, parquet.examples, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        assert a == b
    assert dict(jsonl.examples[0]) == GSM8K[0] | {
        "prompt": "How many?",
        "rendered_prompt": "<user>How many?<assistant>",
    }


def test_a_pattern_reads_its_files_in_the_order_of_their_names(tmp_path: Path):
    rows = [{"question": f"Is it {i}?", "answer": str(i)} for i in range(8)]
    for number in (3, 1, 2):
        write(tmp_path / f"part-{number}.jsonl", rows[2 * number : 2 * number + 2])
    write(tmp_path / "part-4.jsonl", [])  # a shard may be empty
    (tmp_path / "deep").mkdir()
    plain = Path(write(tmp_path / "deep/last.jsonl", rows[:2])).read_bytes()
    (tmp_path / "deep/last.jsonl.gz").write_bytes(gzip.compress(plain))
    (tmp_path / "part-folder.jsonl").mkdir()

    def read(pattern):
        return [dict(row.record) for row in read_rows(f"{tmp_path}/{pattern}")]

    assert read("part-*.jsonl") == rows[2:]
    assert read("part-[13].jsonl") == [*rows[2:4], *rows[6:]]
    assert read("**/*.jsonl.gz") == read("deep/last.jsonl") == rows[:2]
    Path(tmp_path / "part-[0].jsonl").write_bytes(plain)
    assert read("part-[0].jsonl") == rows[:2]  # the name of a file is not a pattern
    (where, _), *_ = read_rows(f"{tmp_path}/deep/*.gz")
    assert where == f"{tmp_path}/deep/last.jsonl.gz:1"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("none-*.jsonl", r"data\.path = '.*none-\*\.jsonl': no file matches this pattern"),
        ("*", r"data\.path = '.*\*': .*a\.csv does not end in \.jsonl or \.jsonl\.gz or"),
        ("b.jsonl", r"data\.path = '.*b\.jsonl': there is no such file; relative paths start"),
        ("empty-*.jsonl", r"empty-\*\.jsonl: the file has no rows"),
        ("cut.jsonl.gz", r"cut\.jsonl\.gz: not readable as gzip"),
    ],
)
def test_patterns_without_data_are_named(tmp_path: Path, pattern, message):
    (tmp_path / "a.csv").touch()
    (tmp_path / "empty-1.jsonl").touch()
    whole = gzip.compress(json.dumps(GSM8K[0]).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-9])
    with pytest.raises(ValueError, match=message):
        list(read_rows(f"{tmp_path}/{pattern}", key="data.path"))


def test_long_prompts_are_dropped_and_counted(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", GSM8K)
    found = prompts(path, max_tokens=30)
    assert len(found.examples) == 1
    assert found.too_long == 1
    with pytest.raises(ValueError, match=r"each of the 2 has more than data\.max_.* = 3 "):
        prompts(path, max_tokens=3)
    assert len(prompts(path, limit=1).examples) == 1


def test_rendering_applies_template_and_format(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", GSM8K[:1])

    def text(rendering, **kw):
        return prompts(path, rendering=rendering, **kw).examples[0]["rendered_prompt"]

    rendering = Rendering(system_prompt="Be brief.", prompt_format="Q: {prompt}\n{x}")
    assert text(rendering) == "<system>Be brief.<user>Q: How many?\n{x}<assistant>"
    assert text(Rendering(template="text", prompt_format="Q: {prompt}")) == "Q: How many?"
    own = {"question": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}
    with pytest.raises(ValueError, match=r"b\.jsonl:1: the row begins with a system message, and"):
        prompts(write(tmp_path / "b.jsonl", [own | {"answer": 1}]), rendering=rendering)
    bare = Letters(chat_template=None)
    assert text(Rendering(), tokenizer=bare) == "How many?"
    with pytest.raises(ValueError, match="has no chat template"):
        text(Rendering(template="chat"), tokenizer=bare)
    with pytest.raises(ValueError, match=r"data\.system_prompt needs a chat template"):
        text(rendering, tokenizer=bare)


@pytest.mark.parametrize(
    ("question", "template", "read"),
    [
        ("How many?", "text", "^How many?"),
        ("^How many?", "text", "^How many?"),
        ("", "text", "^"),
        ("How many?", "chat", "<user>How many?<assistant>"),
    ],
)
def test_the_tokenizer_begins_a_text_unless_a_template_renders_it(
    tmp_path: Path, question, template, read
):
    path = write(tmp_path / "a.jsonl", [{"question": question, "answer": 1}])
    found = prompts(path, rendering=Rendering(template=template)).examples[0]
    assert "".join(map(chr, found.tokens)) == read


def test_a_prompt_may_be_messages(tmp_path: Path):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path = write(tmp_path / "a.jsonl", [{"question": messages, "answer": 1}])
    with pytest.raises(ValueError, match=r"a\.jsonl:1: message 2 \(assistant\): a prompt must not"):
        prompts(path)
    messages.append({"role": "user", "content": "And?"})
    path = write(tmp_path / "a.jsonl", [{"question": messages, "answer": 1}])
    (example,) = prompts(path).examples
    assert example["rendered_prompt"] == "<user>Hi<assistant>Hello<user>And?<assistant>"
    assert example["prompt"] == example["question"] == messages
    with pytest.raises(ValueError, match=r"a\.jsonl:1: .*needs a chat template"):
        prompts(path, rendering=Rendering(template="text"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a\.jsonl:2: not JSON"),
        ("[1]", r"a\.jsonl:2: expected an object"),
        ('{"q": 1}', r"a\.jsonl:2: no 'question'; the columns are 'q'; set data\.prompt_key"),
        ('{"question": 7, "answer": 1}', r"a\.jsonl:2: 'question' is 7, expected a text"),
        ('{"question": null, "answer": 1}', r"a\.jsonl:2: 'question' is null; write a value"),
        ('{"question": "x"}', r"a\.jsonl:2: no 'answer'; .*; set data\.answer_key, to 'none' if"),
    ],
)
def test_errors_name_file_line_and_key(tmp_path: Path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(GSM8K[0]) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        prompts(str(path))


def test_reference_answers_are_optional(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [{"question": "x"}])
    assert "answer" not in prompts(path, answer_key=None).examples[0]


def test_unreadable_sources_are_refused(tmp_path: Path, monkeypatch):
    with pytest.raises(ValueError, match="there is no such file"):
        prompts(str(tmp_path / "none.jsonl"))
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ValueError, match=r"does not end in \.jsonl or"):
        prompts(str(tmp_path / "a.csv"))
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install datasets"):
        prompts("openai/gsm8k")


@given(
    size=st.integers(1, 20),
    counts=st.lists(st.integers(0, 15), max_size=6),
    start=st.integers(0, 50),
    seed=st.integers(0, 3),
)
def test_the_order_depends_on_the_position_alone(size, counts, start, seed):
    whole = next_indices(size, position=start, count=sum(counts), seed=seed)
    places = start + np.cumsum([0, *counts])
    parts = [
        next_indices(size, position=int(p), count=c, seed=seed)
        for p, c in zip(places, counts, strict=False)
    ]
    np.testing.assert_array_equal(whole, np.concatenate([*parts, np.zeros(0, int)]))


@given(size=st.integers(1, 30), epoch=st.integers(0, 5), seed=st.integers(0, 9))
def test_each_epoch_is_a_permutation(size, epoch, seed):
    taken = next_indices(size, position=epoch * size, count=size, seed=seed)
    assert sorted(taken) == list(range(size))


ROW = b'{"question": "x", "answer": "y"}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", r"a\.jsonl: the file has no rows"),
        ("a.jsonl", b"\n \n", r"a\.jsonl: the file has no rows"),
        ("a.jsonl", ROW.decode().encode("utf-16"), r"a\.jsonl:1: not UTF-8: .*; save"),
        ("a.jsonl", ROW + b"\n" + ROW.replace(b"x", b"\xe4"), r"a\.jsonl:2: not UTF-8"),
        ("a.jsonl", ROW.replace(b"x", b"\\ud83d"), r"a\.jsonl:1: '.ud83d' is half of a character"),
        ("a.jsonl", b'{"n": ' + b"9" * 5000 + b"}", r"a\.jsonl:1: not JSON: Exceeds the limit"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: not JSON: maximum recursion"),
        ("a.parquet", b"", r"a\.parquet: not readable as parquet"),
        ("a.parquet", b"PAR1" + b"x" * 100 + b"PAR1", r"a\.parquet: not readable as parquet"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prompts(str(tmp_path / name))


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + ROW)
    assert prompts(str(tmp_path / "a.jsonl")).examples[0]["answer"] == "y"


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ({"role": "user", "content": None}, r" \(user\): content is None, expected a text"),
        ({"role": "user"}, r" \(user\): content is None, expected a text"),
        ({"role": "user", "content": 5}, r" \(user\): content is 5, expected a text or a list of"),
        ({"role": 3, "content": ""}, ": role is 3, expected a text such as 'user'"),
        (7, " is 7, expected an object with role and content"),
    ],
)
def test_messages_are_texts(tmp_path: Path, message, fault):
    before = {"role": "user", "content": "Hi"}
    path = write(tmp_path / "a.jsonl", [{"question": [before, message], "answer": 1}])
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: 'question', message 2{fault}"):
        prompts(path)


@pytest.mark.parametrize(
    ("rendered", "message"),
    [
        (lambda: 1 / 0, r"a\.jsonl:1: the model's chat template cannot render .*ZeroDivision"),
        (lambda: 7, r"a\.jsonl:1: the model's chat template returns 7, expected a text"),
        (lambda: "x\ud800", r"a\.jsonl:1: the model's chat template .*'\\ud800' is half of a char"),
    ],
)
def test_a_chat_template_that_fails_is_named(tmp_path: Path, rendered, message):
    tokenizer = Letters()
    tokenizer.apply_chat_template = lambda *_, **__: rendered()
    with pytest.raises(ValueError, match=message):
        prompts(write(tmp_path / "a.jsonl", GSM8K), tokenizer=tokenizer)


def test_long_text_is_dropped_untokenised(tmp_path: Path):
    class Once(Letters):
        def encode(self, text, *, add_special_tokens):
            assert len(text) < 1000
            return super().encode(text, add_special_tokens=add_special_tokens)

    rows = [*GSM8K, {"question": "x" * 10_000_000, "answer": ""}]
    assert prompts(write(tmp_path / "a.jsonl", rows), tokenizer=Once()).too_long == 1


def test_prompts_encoded_together_are_as_each_alone(tmp_path: Path):
    tokenizer = Checkpoint(tiny.write_checkpoint(tmp_path / "model")).tokenizer
    rows = [{"question": "ab" * (i % 7) + str(i), "answer": i} for i in range(2300)]
    path = write(tmp_path / "a.jsonl", rows)
    alone = [tokenizer.encode(row["question"], add_special_tokens=False) for row in rows]
    short = [ids for ids in alone if len(ids) <= 12]
    for limit in (None, 1500):
        found = prompts(
            path, tokenizer=tokenizer, rendering=Rendering("text"), max_tokens=12, limit=limit
        )
        assert [one.tokens.tolist() for one in found.examples] == short[:limit]
        assert limit or found.too_long == len(alone) - len(short) > 0
