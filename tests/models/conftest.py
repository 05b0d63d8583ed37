"""Fixtures of the models' tests."""

from typing import Any

import jax
import pytest


@pytest.fixture
def cudnn_by_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes what cuDNN would with XLA: there is no GPU."""
    attend = jax.nn.dot_product_attention

    def by_xla(*args: Any, **kwargs: Any) -> jax.Array:
        return attend(*args, **kwargs | {"implementation": "xla"})

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
