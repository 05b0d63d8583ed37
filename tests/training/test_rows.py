"""Prompts are shared where everything in a run allows it, and the log says why not elsewhere."""

import jax
import pytest

from jaxrl.builders import rows as builder
from jaxrl.builders.layout import make_layout, own_layout
from jaxrl.builders.learner import max_rows
from jaxrl.builders.recipe import make_recipe
from jaxrl.builders.rows import choose_rows
from jaxrl.config.training import Config
from jaxrl.core.packing import ANYWHERE, SHARED, Alignment
from tests import tiny
from tests.commands.plan.configs import make_config

SMALL = {"data__max_prompt_tokens": "40", "train__microbatch_tokens": "120"}


def chosen(directory, *, sizes=tiny.CONFIG, **changes) -> tuple[Config, Alignment, str]:
    alone = {"mesh__fsdp": "1", "mesh__tensor": "1", "train__microbatch_tokens": "4096"}
    config = make_config(directory, **alone | changes)
    layout = make_layout(config.mesh, devices=jax.devices()[: 2 if config.mesh.context > 1 else 1])
    return choose_rows(config, sizes, objective=make_recipe(config).objective, layout=layout)


@pytest.mark.parametrize(
    ("changes", "length", "rows"),
    [
        ({}, 4096, 1),  # 31 groups of 64 + 4 x 17 tokens, rounded up to blocks
        ({"data__max_prompt_tokens": "600"}, 4096, 1),  # six groups of 668 tokens
        (
            {"data__max_prompt_tokens": "3000", "sampling__max_tokens": "900"},
            4096,
            1,
        ),  # part of one
        (SMALL, 108, 1),  # no block fits
        (SMALL | {"mesh__context": "2"}, 108, 1),
        ({"train__row_length": "1024"}, 1024, 4),  # as the config says
    ],
)
def test_rows_hold_whole_groups(changes, length, rows, tmp_path):
    config, align, note = chosen(tmp_path, **{"data__max_prompt_tokens": "64"} | changes)
    assert (config.row_length, config.microbatch_rows, align) == (length, rows, SHARED)
    assert note == f"completions of a group share their prompt, in rows of {length} tokens"
    assert max_rows(config, align) <= 32


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"train__packing": "false"}, "train.packing = false"),
        ({"precision": "fp32,sums=fixed"}, "sums=fixed in precision"),
        ({"loss__balance": "0.1"}, "the loss balances experts over whole sequences"),
        (
            {"reference_mesh__data": "2"},
            "reference_mesh does not divide microbatches of 1 rows of 4096 tokens",
        ),
        (
            {"critic_mesh__data": "1", "critic_mesh__context": "3"},
            "critic_mesh does not divide microbatches of 1 rows of 4096 tokens",
        ),
        ({}, "a shared one saves too little, 1.52 times fewer tokens"),
    ],
)
def test_the_log_says_what_keeps_prompts_apart(changes, reason, tmp_path):
    config, align, note = chosen(tmp_path, **changes)
    assert config.row_length == 32
    assert not align.shared
    assert note.startswith(f"every completion computes its own prompt: {reason}")


def test_dense_kernels_share_long_prompts_only(tmp_path, monkeypatch):
    long = {"data__max_prompt_tokens": "500", "sampling__max_tokens": "99"}

    def by(kernel, **changes):
        monkeypatch.setattr(builder, "choose_kernel", lambda *_, **__: kernel)
        return chosen(tmp_path, **changes)

    config, align, _ = by("cudnn", **long)
    assert (config.row_length, align) == (1024, SHARED)  # 500 + 4 x 100 tokens
    config, align, note = by("cudnn")
    assert (config.row_length, align) == (32, ANYWHERE)
    assert "behind a prompt of 16 cost more in attention by cudnn" in note
    config, align, note = by("splash", **long)
    assert (config.row_length, align) == (599, ANYWHERE)
    assert "attention by splash compares one segment per token" in note


def test_linear_layers_keep_prompts_apart(tmp_path):
    _, _, note = chosen(tmp_path, sizes=tiny.NEXT, data__max_prompt_tokens="64")
    assert note.endswith("its own prompt: a linear layer's state belongs to one sequence")


@pytest.mark.parametrize("table", ["critic_mesh", "reference_mesh", "reward_mesh"])
def test_a_mesh_that_does_not_divide_the_rows_is_refused(table, tmp_path):
    keys = {"mesh__fsdp": "1", "mesh__tensor": "1", f"{table}__data": "1", f"{table}__context": "3"}
    config = make_config(tmp_path, **keys, reward__model="teacher", train__packing="false")
    layout = make_layout(config.mesh, devices=jax.devices()[:1])
    said = rf"{table}\.context = 3 .* 32 tokens; set train\.row_length to a multiple"
    with pytest.raises(ValueError, match=said):
        own_layout(config, table, shared=layout)
