"""The line about the devices of a run."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxrl.builders import model as builder
from jaxrl.core.precision import PRESETS


@pytest.mark.parametrize(
    ("precision", "platform", "cost"),
    [
        (
            "fp16_master",
            "tpu",
            "; each product of f16 is 3 of bf16 (2.5 to 3.0 times the cycles), and splash takes no "
            "f16; see jaxrl doctor MODEL --budget .01 --topology v5p:1x1x1",
        ),
        ("bf16_master", "tpu", ""),
        ("fp16_master", "cuda", ""),
    ],
)
def test_the_log_says_what_a_product_costs(precision, platform, cost, monkeypatch):
    device: Any = SimpleNamespace(platform=platform, device_kind="a chip")
    mesh = SimpleNamespace(size=1, devices=SimpleNamespace(flat=[device]))
    config, model, layout = (
        SimpleNamespace(precision=PRESETS[precision]),
        SimpleNamespace(config=None),
        SimpleNamespace(mesh=mesh),
    )
    monkeypatch.setattr(builder, "choose_kernel", lambda *_, **__: "xla")
    monkeypatch.setattr(builder.models, "verify_kernel", lambda *_, **__: None)
    note = builder.attention_note(config, model, layout=layout)  # type: ignore[arg-type]
    assert note == f"1 x a chip, attention by xla{cost}"
