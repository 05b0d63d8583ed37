"""Certificates judge by the numbers of their definitions, and hold for their own facts alone."""

import json

import numpy as np
import pytest

from jaxrl.bridge.servers import facts
from jaxrl.diagnostics.ratio.certificate import Certificate, certify, forward_facts
from jaxrl.diagnostics.ratio.split import LogRatio
from jaxrl.losses import Clip

CLIP = Clip(0.2, 0.28)


def tokens(ratios) -> LogRatio:
    sampler = np.linspace(-3, -0.1, len(ratios))
    learner = sampler + np.log(ratios)
    learner[np.array(ratios) == 1] = sampler[np.array(ratios) == 1]
    zeros = np.zeros(len(ratios))
    return LogRatio(learner, sampler, sampler, zeros, sequences=np.zeros(len(ratios), int))


def test_numbers_are_those_of_the_definitions():
    ratios = np.array([1, 1, 1.0015, 0.9985, 1.009, 0.96, 1.2, 1.3, 0.7, 0.79])
    found = certify(tokens(ratios), clip=CLIP, facts={}).numbers
    assert found["tokens"] == 10
    assert found["kl"] == pytest.approx(np.mean(ratios - np.log(ratios) - 1), abs=1e-12)
    assert found["ratio_in_0.999_1.002"] == pytest.approx(0.3)
    assert found["ratio_in_0.99_1.01"] == pytest.approx(0.5)
    assert found["ratio_in_0.95_1.05"] == pytest.approx(0.6)
    # 1.3 is clipped if its advantage is positive, .7 and .79 if theirs is negative.
    assert found["phantom"] == pytest.approx((0.5 + 0.5 + 0.5) / 10)
    assert found["equal"] == pytest.approx(0.2)


def test_each_bar_fails_alone():
    even = np.full(2000, 1.0)
    assert certify(tokens(even), clip=CLIP, facts={}).passed
    clipped = even.copy()
    clipped[:6] = 1.3  # 3 of 2000 phantom clips; a KL of 1e-4
    found = certify(tokens(clipped), clip=CLIP, facts={})
    assert not found.passed
    assert len(found.reasons) == 1
    assert "clips 0.15 % of the tokens at a clip of 0.8 to 1.28" in found.reasons[0]
    wide = certify(tokens(np.full(1000, 1.19)), clip=CLIP, facts={})  # a KL of .016
    assert len(wide.reasons) == 1
    assert "mismatch KL is 0.016" in wide.reasons[0]
    unknown = certify(tokens(np.append(even, np.nan)), clip=CLIP, facts={})
    assert not unknown.passed
    few = certify(tokens(even[:999]), clip=CLIP, facts={})
    assert len(few.reasons) == 1
    assert "999 tokens cannot show a share of 0.1 %" in few.reasons[0]


@pytest.mark.parametrize("unit", ["mean", "product"])
def test_clip_of_sequences_takes_all_of_their_tokens(unit):
    """At a ratio of the sequence, as gspo and rloo have it."""
    ratios = np.array([1.1, 1.1, 1.1, 0.95, 1.05, 0.7, 1, 1, 1, 1])
    of_token = np.repeat([0, 1, 2], [3, 3, 4])
    ends = [np.log(ratios[of_token == i]) for i in range(3)]
    own = np.exp([x.mean() if unit == "mean" else x.sum() for x in ends])
    clipped = (own > 1.28) | (own < 0.8)
    assert clipped.any() == (unit == "product")
    found = tokens(ratios)._replace(sequences=of_token)
    shares = certify(found, clip=Clip(0.2, 0.28, unit), facts={}).numbers
    assert shares["phantom"] == pytest.approx(clipped[of_token].mean() / 2)
    assert certify(found, clip=Clip(0.06, 0.06, unit), facts={}).numbers["phantom"] > 0.2
    assert certify(found, clip=CLIP, facts={}).numbers["phantom"] == 0.05  # the token of 0.7


def test_certificate_survives_its_file_and_names_what_changed():
    here = forward_facts("bf16_master") | {"vLLM": "0.32.0", "seed": "0"}
    made = certify(tokens(np.ones(3)), clip=CLIP, facts=here)
    again = Certificate.from_json(made.to_json())
    assert again == made
    assert again.changes(here) == []
    # The update's roles are not part of a forward pass.
    assert forward_facts("bf16_master,moments=bf16,loss_scale=static:8") == forward_facts(
        "bf16_master"
    )
    there = forward_facts("bf16_master,logits=bf16") | {"vLLM": "0.33.0"}
    assert again.changes(there) == [
        "precision.logits was f32 and is bf16",
        "seed was 0 and is not there",
        "vLLM was 0.32.0 and is 0.33.0",
    ]


WHOLE = {"passed": True, "reasons": [], "numbers": {"tokens": 1000, "kl": 0.0}, "facts": {}}
OTHERS = [{"passed": "yes"}, {"numbers": {}}, {"numbers": {"tokens": 9, "kl": None}}, {"new": 1}]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"passed"', b"\xff", *(json.dumps(WHOLE | one) for one in OTHERS)]
)
def test_other_files_are_refused(text):
    """Empty, cut off, damaged, and from a version with another field."""
    Certificate.from_json(json.dumps(WHOLE))
    with pytest.raises(ValueError, match="jaxrl doctor --certify"):
        Certificate.from_json(text)


def test_server_facts_are_of_its_arithmetic():
    info = {
        "vllm_config": {
            "model_config": {"dtype": "torch.bfloat16", "hf_overrides": {}, "max_model_len": 128},
            "cache_config": {"cache_dtype": "auto", "kv_cache_memory_bytes": 5},
            "attention_config": {"backend": None},
            "speculative_config": None,
        },
        "vllm_env": {"VLLM_BATCH_INVARIANT": False, "VLLM_PORT": 5},
    }
    first = facts.of_server(info)
    sizes = json.loads(json.dumps(info))
    sizes["vllm_config"]["model_config"]["max_model_len"] = 256
    sizes["vllm_config"]["cache_config"]["kv_cache_memory_bytes"] = 6
    assert facts.of_server(sizes) == first
    for table, name, value in (
        ("model_config", "dtype", "torch.float16"),
        ("model_config", "hf_overrides", {"head_dtype": "float32"}),
        ("cache_config", "cache_dtype", "fp8"),
        ("attention_config", "backend", "FLASHINFER"),
    ):
        other = json.loads(json.dumps(info))
        other["vllm_config"][table][name] = value
        assert facts.of_server(other).items() ^ first.items() == {
            (f"{table}.{name}", str(value)),
            (f"{table}.{name}", str(info["vllm_config"][table][name])),
        }
    other = json.loads(json.dumps(info))
    other["vllm_env"]["VLLM_BATCH_INVARIANT"] = True
    assert facts.of_server(other) != first
