"""A judge on a server with an OpenAI-compatible route, as a reward, or for `judge.path`.

JUDGE_URL=http://127.0.0.1:8000/v1 JUDGE_MODEL=NAME \
    jaxrl train configs/quickstart.toml --reward.path examples/judge.py:ask

JUDGE_RUBRIC names a file that replaces QUESTION. What was answered is not asked again. At the end
a line tells what the judge cost, in dollars if JUDGE_PRICES gives them for a million tokens of
questions and of replies, such as 0.15,0.60.
"""

import atexit
import os
import re
import sys
from collections import Counter
from pathlib import Path

import httpx2

QUESTION = """Judge the answer to the question. Reply with one number from 0 (wrong) to 10 (right).

Question: {prompt}
Reference answer: {answer}
Answer to judge: {completion}"""

cache: dict[str, float] = {}
spent: Counter[str] = Counter()


async def ask(completion, example):
    """Returns the judge's number / 10; raises if the server or its reply fails."""
    rubric = os.environ.get("JUDGE_RUBRIC")
    question = (Path(rubric).read_text() if rubric else QUESTION).format(
        prompt=example["prompt"], answer=example.get("answer", "none"), completion=completion
    )
    if question in cache:
        spent["repeated"] += 1
        return cache[question]
    body = {
        "model": os.environ["JUDGE_MODEL"],
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
    }
    headers = {"Authorization": f"Bearer {os.environ.get('JUDGE_API_KEY', 'none')}"}
    async with httpx2.AsyncClient(timeout=None) as client:  # reward.timeout limits the call
        reply = await client.post(
            f"{os.environ['JUDGE_URL']}/chat/completions", json=body, headers=headers
        )
    content = reply.raise_for_status().json()
    usage = content.get("usage", {})
    spent.update(calls=1, read=usage.get("prompt_tokens", 0))
    spent.update(written=usage.get("completion_tokens", 0))
    text = content["choices"][0]["message"]["content"]
    number = re.search(r"\d+(\.\d+)?", text)
    if number is None:
        raise ValueError(f"the judge gave no number: {text!r:.80}")
    cache[question] = min(float(number[0]), 10.0) / 10
    return cache[question]


def cost():
    """Describes what was asked, and what it cost."""
    line = (
        f"judge: {spent['calls']} questions, and {spent['repeated']} that were asked before; "
        f"{spent['read']:,} tokens read, {spent['written']:,} written"
    )
    if prices := os.environ.get("JUDGE_PRICES"):
        read, written = map(float, prices.split(","))
        line += f"; ${(spent['read'] * read + spent['written'] * written) / 1e6:.2f}"
    return line


atexit.register(lambda: print(cost(), file=sys.stderr) if spent else None)
