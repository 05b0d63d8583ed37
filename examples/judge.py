"""A judge on a server with an OpenAI-compatible route, for `judge.path`, or `reward.path`.

JUDGE_URL=http://127.0.0.1:8000/v1 JUDGE_MODEL=NAME \
    jaxrl train configs/quickstart.toml --judge.path examples/judge.py:ask
"""

import os
import re

import httpx2

QUESTION = """Judge the answer to the question. Reply with one number from 0 (wrong) to 10 (right).

Question: {prompt}
Reference answer: {answer}
Answer to judge: {completion}"""


async def ask(completion, example):
    """Returns the judge's number / 10; raises if the server or its reply fails."""
    question = QUESTION.format(
        prompt=example["prompt"], answer=example.get("answer", "none"), completion=completion
    )
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
    text = reply.raise_for_status().json()["choices"][0]["message"]["content"]
    number = re.search(r"\d+(\.\d+)?", text)
    if number is None:
        raise ValueError(f"the judge gave no number: {text!r:.80}")
    return min(float(number[0]), 10.0) / 10
