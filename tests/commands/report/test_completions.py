"""Completions on the page: as turns of a chat, collapsed, and then and now."""

import re

import pytest

from jaxrl.commands.report.collect import collect
from jaxrl.commands.report.command import render
from tests import published
from tests.browser import CHROMIUM, open_page
from tests.commands.report.made_up import SAMPLE, entry, write

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium on PATH (Debian: apt-get install chromium)"
)
MESSAGES = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "And <b>3 + 3</b>?"},
]
TOOL = (
    '<think>\nI search.\n</think>\n\n<tool_call>\n{"name": "find"}\n</tool_call><|im_end|>\n'
    "<|im_start|>user\n<tool_response>\nLima\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    "It is Lima.<|im_end|>"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with open_page(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def show(page, tmp_path, samples):
    write(tmp_path / "metrics.jsonl", [entry(s, slope=0.1) for s in range(1, 21)])
    write(tmp_path / "samples.jsonl", samples)
    file = tmp_path / "page.html"
    file.write_text(render([collect(tmp_path, name="run")]))
    page.open(file, width=1400, dark=False)
    assert page.errors == []


def sample(tokens, **changes):
    size = len(tokens)
    numbers = {name: [0.5] * size for name in ("advantages", "probabilities")}
    return {
        **{k: v for k, v in SAMPLE.items() if k not in ("parts", "entropies", "betas")},
        **{"tokens": tokens, "length": size, "actions": [True] * size, **numbers, **changes},
    }


def texts(page, selector):
    return page.run(f"[...document.querySelectorAll('{selector}')].map((e) => e.textContent)")


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "gemma3", "llama3", "llama3_1", "deepseek_v3", "mistral_nemo"]
)
def test_published_templates_are_folded(page, tmp_path, name):
    tokenizer = published.tokenizer(name)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    show(page, tmp_path, [sample(["6"], prompt=text)])
    roles = texts(page, ".prompt .role")
    contents = [content.strip() for content in texts(page, ".prompt pre")]
    said = [(m["role"], m["content"]) for m in MESSAGES]
    found = list(zip(roles, contents, strict=True))
    assert found[-3:] == said
    assert all(role == "system" for role, _ in found[:-3])  # a template may add one
    page.run(
        "(() => { const s = document.getElementById('completion-markers'); s.value = 'shown';"
        "s.dispatchEvent(new Event('change')); })()"
    )
    assert texts(page, ".prompt") == [text]


def test_turns_tool_calls_and_observations_are_bubbles(page, tmp_path):
    tokens = re.findall(r"<\|?[\w/]+\|?>|\w+|\s|.", TOOL)
    start = TOOL.index("<|im_end|>\n")
    places = [len("".join(tokens[:i])) for i in range(len(tokens))]
    end = TOOL.index("It is Lima")
    actions = [not start + 11 <= place < end for place in places]
    show(page, tmp_path, [sample(tokens, actions=actions)])
    roles = texts(page, ".completion .role")
    assert roles == ["thinking", "tool call", "tool", "assistant"]
    contents = texts(page, ".completion pre")
    assert [content.strip() for content in contents] == [
        "I search.",
        '{"name": "find"}',
        "Lima",
        "It is Lima.",
    ]
    assert page.run("document.querySelectorAll('.bubble.tool .token:not(.observed)').length") == 0

    plain = sample(["Where", "?", " here", " there"], actions=[True, True, False, True])
    show(page, tmp_path, [plain])
    assert texts(page, ".completion .role") == ["assistant", "observation", "assistant"]
    assert texts(page, ".completion pre") == ["Where?", " here", " there"]


def test_equal_completions_are_collapsed_and_the_rate_counts_all(page, tmp_path):
    group = {"group_size": 8, "group_mean": 0.75}
    right = [sample(["4"], **group)] * 3
    show(page, tmp_path, [*right, sample(["5"], reward=0.0, **group)])
    assert texts(page, ".completion pre") == ["4", "5"]
    assert texts(page, ".completion .chip") == ["\u00d7 3"]
    assert texts(page, ".rate") == ["6 of 8 right"]
    assert page.run("document.querySelector('meter').value") == 0.75
    # A link to a collapsed one leads to those that are like it.
    page.run("location.hash = '#completion-0-2'; new Promise((done) => setTimeout(done, 100))")
    assert page.run("document.querySelector('.linked pre').textContent") == "4"
    show(page, tmp_path, [sample(["4"], reward=0.3, group_size=8, group_mean=0.25)])
    assert "mean reward 0.25 of 8" in texts(page, ".prompt-head")[0]


def test_held_out_prompts_then_and_now(page, tmp_path):
    def held_out(step, group, text, reward):
        tokens = [part for word in text.split(" ") for part in (" ", word)][1:]
        logged = {"step": step, "group": group, "prompt": f"prompt {group}", "reward": reward}
        return sample(tokens, held_out=True, **logged)

    show(
        page,
        tmp_path,
        [
            held_out(0, 0, "it is 4", 1.0),
            held_out(0, 1, "1 + 2 = 5", 0.0),
            held_out(10, 0, "it is 4", 1.0),
            held_out(10, 1, "1 + 2 = 4", 0.0),
            held_out(20, 0, "it is 4", 1.0),
            held_out(20, 1, "1 + 2 = 3", 1.0),
            sample(["trained"]),
        ],
    )
    assert texts(page, ".pair .prompt") == ["prompt 1", "prompt 0"]  # the one that changed first
    assert texts(page, ".side .verdict") == ["wrong", "right", "right", "right"]
    assert texts(page, ".side pre") == ["1 + 2 = 5", "1 + 2 = 3", "it is 4", "it is 4"]
    assert texts(page, ".side mark") == ["5", "3"]
    tops = page.run(
        "[...document.querySelectorAll('.pair')[0].querySelectorAll('.side')]"
        ".map((e) => e.getBoundingClientRect().top)"
    )
    assert tops[0] == tops[1]
    move = (
        "(() => {{ const s = document.getElementById('then-step'); s.value = {};"
        "s.dispatchEvent(new Event('input')); }})()"
    )
    page.run(move.format(1))
    assert texts(page, ".side .verdict") == ["right", "right", "wrong", "wrong"]
    assert texts(page, ".side mark") == ["5", "4"]
    assert "10" in texts(page, "#then-controls .slider")[0]
    page.run(move.format(0))
    assert texts(page, ".side pre") == ["it is 4", "1 + 2 = 5"]  # the beginning alone
    # They are not among the samples of training.
    assert texts(page, ".completion pre") == ["trained"]
    show(page, tmp_path, [sample(["trained"])])
    assert page.run("document.getElementById('then-and-now').offsetHeight") == 0
