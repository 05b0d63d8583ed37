from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS, by_rows, change, make_rules

MESHES = [
    {"data": 8},
    {"fsdp": 8},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 4, "tensor": 2},
    {"data": 2, "tensor": 4},
]


class Leaf(NamedTuple):
    shape: tuple[int, ...]
    axes: tuple[str, ...]


DECLARED = {
    "embed": Leaf((32, 16), ("vocab", "embed")),
    "final_norm": Leaf((16,), ("norm",)),
    "layers": {
        "attn_norm": Leaf((3, 16), ("layers", "norm")),
        "q": Leaf((3, 24, 16), ("layers", "q_heads", "embed")),
        "o": Leaf((3, 16, 24), ("layers", "embed", "q_heads")),
        "k_bias": Leaf((3, 8), ("layers", "kv_heads")),
    },
}


def parameters():
    key = jax.random.key(0)
    is_leaf = lambda x: isinstance(x, Leaf)  # noqa: E731
    return jax.tree.map(lambda d: jax.random.normal(key, d.shape), DECLARED, is_leaf=is_leaf)


def layout(preset="fsdp_tensor", **sizes):
    return Layout(make_mesh(**sizes), PRESETS[preset])


@pytest.mark.parametrize(
    ("preset", "axes", "expected"),
    [
        ("data", ("layers", "q_heads", "embed"), PartitionSpec()),
        ("fsdp", ("layers", "q_heads", "embed"), PartitionSpec(None, None, "fsdp")),
        ("fsdp", ("layers", "embed", "mlp"), PartitionSpec(None, "fsdp")),
        ("tensor", ("layers", "embed", "mlp"), PartitionSpec(None, None, "tensor")),
        ("fsdp_tensor", ("vocab", "embed"), PartitionSpec("tensor", "fsdp")),
        ("fsdp_tensor", ("norm",), PartitionSpec()),
    ],
)
def test_presets_cut_parameters(preset, axes, expected):
    assert layout(preset, data=2, fsdp=2, tensor=2).sharding(axes).spec == expected


def test_experts_and_rows_have_own_axes():
    experts = ("layers", "experts", "mlp", "embed")
    cut = layout("expert", fsdp=2, expert=4)
    assert cut.sharding(experts).spec == PartitionSpec(None, "expert", None, "fsdp")
    assert cut.batch(("batch", "length")).spec == PartitionSpec(("fsdp", "expert"))
    cut = layout("context", fsdp=2, context=4)
    assert cut.sharding(("vocab", "embed")).spec == PartitionSpec(None, ("fsdp", "context"))
    assert cut.batch(("batch", "length", "mlp")).spec == PartitionSpec("fsdp", "context")
    assert (cut.axes("length"), cut.count("length"), cut.count("mlp")) == (("context",), 4, 1)
    cut = layout("all", expert=2, context=2, tensor=2)
    assert cut.sharding(experts).spec == PartitionSpec(None, "expert", "tensor", "context")


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_cuts_a_parameter_twice(preset):
    one_device = Layout(make_mesh(devices=jax.devices()[:1]), PRESETS[preset])
    one_device.tree(DECLARED | {"experts": Leaf((4, 8, 16), ("experts", "mlp", "embed"))})


def test_rules_are_changed_by_text():
    rules = change(
        PRESETS["all"], parameters=["embed=data+fsdp", "vocab="], activations=["length="]
    )
    cut = Layout(make_mesh(data=2, fsdp=2, tensor=2), rules)
    assert cut.sharding(("vocab", "embed")).spec == PartitionSpec(None, ("data", "fsdp"))
    assert cut.batch(("batch", "length", "mlp")).spec == PartitionSpec(
        ("data", "fsdp"), None, "tensor"
    )
    for wrong in (["embed"], ["=fsdp"], ["embed=fsdp", "embed="]):
        with pytest.raises(ValueError, match=f"rule '{wrong[-1]}': expected one LOGICAL=MESH"):
            change(PRESETS["all"], parameters=wrong, activations=[])
    with pytest.raises(ValueError, match="'embd=fsdp': there is no logical axis 'embd'"):
        change(PRESETS["all"], parameters=["embd=fsdp"], activations=[])


def test_rows_alone_are_cut_in_place_of_products():
    rules = by_rows(PRESETS["all"])
    assert rules.parameters == PRESETS["all"].parameters
    cut = Layout(make_mesh(data=2, context=2, tensor=2), rules)
    of_rows = PartitionSpec(("data", "tensor"), "context")
    assert cut.batch(("batch", "length", "mlp")).spec == of_rows
    assert cut.batch(("routed", "length", "vocab")).spec == of_rows
    assert cut.divided is None
    assert layout(data=2, tensor=4).divided == ("vocab", ("tensor",))


def test_parameters_and_activations_have_their_own_rules():
    cut = layout(data=2, fsdp=2, tensor=2)
    assert cut.batch(("batch", "length", "embed")).spec == PartitionSpec(("data", "fsdp"))
    assert cut.batch(("batch", "length", "mlp")).spec == PartitionSpec(
        ("data", "fsdp"), None, "tensor"
    )
    assert cut.sharding(("embed",)).spec == PartitionSpec("fsdp")


def test_axes_of_size_one_are_dropped():
    cut = layout(data=2, tensor=4)
    assert cut.sharding(("vocab", "embed")).spec == PartitionSpec("tensor")
    assert cut.batch(("batch", "length")).spec == PartitionSpec("data")


def test_a_layout_is_a_value():
    assert layout(fsdp=8) == layout(fsdp=8)
    assert hash(layout(fsdp=8)) == hash(layout(fsdp=8))
    assert layout(fsdp=8) != layout(data=8)


@pytest.mark.parametrize("sizes", MESHES)
def test_shards_partition_the_array(sizes):
    cut = layout(**sizes)
    whole = parameters()
    placed = jax.device_put(whole, cut.tree(DECLARED))
    jax.tree.map(np.testing.assert_array_equal, whole, placed)
    parts = cut.mesh.shape["fsdp"] * cut.mesh.shape["tensor"]
    assert all(
        shard.data.size * parts == placed["layers"]["q"].size
        for shard in placed["layers"]["q"].addressable_shards
    )


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-3, momentum=0.9)),
    "two groups": optax.multi_transform(
        {"matrix": optax.sgd(1e-3, momentum=0.9), "vector": optax.adam(1e-3)},
        lambda p: jax.tree.map(lambda x: "matrix" if x.ndim > 2 else "vector", p),
    ),
    "accumulating": optax.MultiSteps(
        optax.adam(1e-3), every_k_schedule=2
    ).gradient_transformation(),
    "factored": optax.adafactor(1e-3, min_dim_size_to_factor=8),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_lie_where_their_parameter_lies(name):
    cut = layout(fsdp=2, tensor=4)
    shapes = jax.eval_shape(parameters)
    state = {"params": shapes, "opt_state": jax.eval_shape(OPTIMIZERS[name].init, shapes)}
    shardings = cut.state(state, DECLARED)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    assert shardings["params"] == cut.tree(DECLARED)
    matrix = DECLARED["layers"]["q"]
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)
    found = [sharding.spec for leaf, sharding in pairs if leaf.shape == matrix.shape]
    # `q` and its copies in the optimizer's state; adafactor keeps factors of other shapes instead.
    copies = {"adamw": 2, "clipped": 1, "two groups": 1, "accumulating": 3, "factored": 0}[name]
    assert found == [cut.sharding(matrix.axes).spec] * (1 + copies)
    placed = jax.jit(OPTIMIZERS[name].init, out_shardings=shardings["opt_state"])(parameters())
    jax.tree.map(np.testing.assert_array_equal, placed, OPTIMIZERS[name].init(parameters()))


def test_constrain_states_the_sharding_in_the_program():
    cut = layout(data=2, fsdp=2, tensor=2)
    x = jnp.arange(4 * 2 * 6.0).reshape(4, 2, 6)
    y = jax.jit(lambda x: cut.constrain(x, ("batch", "length", "mlp")) * 1.0)(x)
    np.testing.assert_array_equal(x, y)
    assert y.sharding.is_equivalent_to(cut.batch(("batch", "length", "mlp")), 3)


def test_one_device_costs_nothing():
    cut = layout(devices=jax.devices()[:1])
    jaxpr = jax.make_jaxpr(lambda x: cut.constrain(x, ("batch", "embed")))(jnp.ones((3, 5)))
    assert not jaxpr.eqns


def test_repeated_mesh_axis_is_an_error():
    rules = make_rules(parameters={"vocab": "fsdp", "embed": ("tensor", "fsdp")}, activations={})
    with pytest.raises(ValueError, match=r"'vocab' and 'embed' are both cut over .* axis 'fsdp'"):
        Layout(make_mesh(fsdp=8), rules).sharding(("vocab", "embed"))
    with pytest.raises(ValueError, match=r"parameter 'embed': .*both cut"):
        Layout(make_mesh(devices=jax.devices()[:1]), rules).tree(DECLARED)
    with pytest.raises(ValueError, match="'mlp' and 'mlp' are both cut"):
        layout(tensor=8).batch(("mlp", "mlp"))


def test_an_unknown_axis_is_an_error():
    with pytest.raises(ValueError, match=r"no rule for 'stages'; the rules know layers, vocab"):
        layout(fsdp=8).sharding(("stages", "embed"))
    with pytest.raises(ValueError, match=r"'a/b': .*no rule for 'stages'"):
        layout(fsdp=8).tree({"a": {"b": Leaf((8,), ("stages",))}})
    rules = make_rules(parameters={"layers": "stage"}, activations={})
    with pytest.raises(ValueError, match=r"mesh axis 'stage'; the mesh has data, fsdp, expert"):
        Layout(make_mesh(fsdp=8), rules)


def test_indivisible_size_names_path_and_numbers():
    with pytest.raises(ValueError, match=r"'layers/k_bias' .*\(3, 8\).*'kv_heads' has size 8") as e:
        Layout(
            make_mesh(tensor=-1, devices=jax.devices()[:3]),
            make_rules(parameters={"kv_heads": "tensor"}, activations={}),
        ).tree(DECLARED)
    assert "3 devices (tensor=3)" in str(e.value)
    with pytest.raises(ValueError, match=r"'batch' has size 6, .* 8 devices \(data=4 x fsdp=2\)"):
        layout(data=4, fsdp=2).constrain(jnp.ones((6, 2)), ("batch", "length"))
    with pytest.raises(ValueError, match=r"shape \(6, 2\) and 1 axes"):
        layout(data=4, fsdp=2).constrain(jnp.ones((6, 2)), ("batch",))
