"""A dtype policy's string form and the loss scale's state machine."""

import dataclasses
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxrl.core.casts import cast
from jaxrl.core.loss_scale import (
    LossScaleSpec,
    dynamic_loss_scale,
    init_loss_scale,
    parse_loss_scale,
    update_loss_scale,
)
from jaxrl.core.precision import (
    LATENT,
    PRESETS,
    ROLES,
    Precision,
    disagreement,
    parse,
    sampler_precision,
)

quick = settings(max_examples=50, derandomize=True, deadline=None, database=None)
dtypes = st.sampled_from([jnp.dtype(d) for d in ("float64", "float32", "bfloat16", "float16")])
scales = st.floats(2.0**-20, 2.0**100)
loss_scales = st.one_of(
    st.just(LossScaleSpec()),
    scales.map(lambda s: LossScaleSpec(initial=s)),
    st.builds(dynamic_loss_scale, scales, st.integers(1, 10**9)),
    st.builds(
        LossScaleSpec,
        initial=scales,
        growth=st.floats(1, 8),
        backoff=st.floats(0.01, 1),
        interval=st.integers(1, 10**9),
        floor=st.floats(1e-3, 10),
    ),
)
roles = dict.fromkeys(ROLES, dtypes) | {"moments": dtypes.filter(lambda dtype: dtype != "float16")}
precisions = st.builds(Precision, **roles, loss_scale=loss_scales)


@quick
@given(precision=precisions)
def test_string_form_round_trips(precision):
    assert parse(str(precision)) == precision
    assert hash(parse(str(precision))) == hash(precision)


def test_presets():
    for name, preset in PRESETS.items():
        assert parse(name) == parse(str(preset)) == preset
    assert str(PRESETS["fp16_master"]).endswith("loss_scale=dynamic:65536:400")
    assert parse(" bf16_master , logits=bf16").logits == jnp.bfloat16
    changed = parse("bf16_master,wire=f32,loss_scale=static:8")
    expected = {"wire": jnp.dtype("float32"), "loss_scale": LossScaleSpec(initial=8.0)}
    assert changed == dataclasses.replace(PRESETS["bf16_master"], **expected)


def test_text_is_kept_until_a_role_changes():
    text = " bf16_master , logits=bf16"
    precision = parse(text)
    assert Precision.of(precision) is precision
    assert Precision.of(text) == precision
    assert Precision.of(text).text == precision.text == text
    changed = dataclasses.replace(precision, logits="f32")
    assert (changed, changed.text) == (parse("bf16_master"), str(changed))
    with pytest.raises(ValueError, match="3 is not a dtype policy; give its text"):
        Precision.of(3)  # pyrefly: ignore[bad-argument-type]


FACES = ["jaxrl", "jaxrl.core", "jaxrl.learner", "jaxrl.models", "jaxrl.sampling"]


@pytest.mark.parametrize("name", FACES)
def test_public_functions_accept_precision_text(name):
    face = importlib.import_module(name)
    public = {name: getattr(face, name) for name in dir(face)}
    found = {
        name: getattr(one.__init__ if isinstance(one, type) else one, "__annotations__", {})
        for name, one in public.items()
    }
    kinds = {name: kind["precision"] for name, kind in found.items() if "precision" in kind}
    assert kinds
    assert {name for name, kind in kinds.items() if kind != Precision | str} == set()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp8", "no preset 'fp8'; presets are fp32, bf16"),
        ("", "no preset ''"),
        ("bf16,head=f32", "no role 'head'; roles are params, compute"),
        ("bf16,logits=fp32", "logits='fp32' is not a dtype; dtypes are f64, f32"),
        ("bf16,logits", "logits='' is not a dtype"),
        ("bf16,wire=f32,wire=f16", "wire is given twice"),
        ("params=f32,compute=f32", "missing: activations, logits"),
        ("bf16,loss_scale=big", "'big' is not a loss scale"),
    ],
)
def test_errors_name_the_text(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        *("static", "static:0", "static:-1", "static:inf", "static:nan", "none:1"),
        *("dynamic:1:0", "dynamic:1:2:3", "dynamic:1:2:.5:.5:1", "dynamic:1:2:2:2:1"),
        *("dynamic:1:2147483648", "dynamic:1:2:2:.5:inf"),
    ],
)
def test_impossible_loss_scales(text):
    with pytest.raises(ValueError, match="is not a loss scale"):
        parse_loss_scale(text)


@pytest.mark.parametrize("role", ROLES)
def test_role_takes_dtype_type_or_name(role):
    precision = PRESETS["fp32"]
    expected = parse(f"fp32,{role}=bf16")
    for value in ("bf16", jnp.bfloat16, jnp.dtype(jnp.bfloat16), np.dtype("bfloat16").type):
        changed = dataclasses.replace(precision, **{role: value})
        assert changed == expected
        assert hash(changed) == hash(expected)
        assert str(changed) == str(expected)
        assert isinstance(getattr(changed, role), np.dtype)
    assert dataclasses.replace(expected, **{role: np.float32}) == precision
    roles = dict.fromkeys(ROLES, "f32") | {role: "bf16"}
    assert Precision(**roles, loss_scale="none") == expected


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("bfloat16", "'bfloat16'"),
        (jnp.int32, "int32"),
        (float, "float"),
        (None, "None"),
        (16, "16"),
        (np.dtype("int8"), "int8"),
    ],
)
def test_other_values_of_a_role_are_refused(value, said):
    names = "f64, f32, bf16, f16, f8_e4m3"
    with pytest.raises(ValueError, match=rf"logits=.*{said}.* is not a dtype; .*{names}, .*jnp\."):
        dataclasses.replace(PRESETS["fp32"], logits=value)


def test_products_accumulate_in_at_least_f32():
    assert parse("bf16").accumulate == parse("fp16_master").accumulate == jnp.float32
    assert parse("fp32,compute=f64").accumulate == jnp.float64


def test_sampler_precision_computes_as_the_sampler_does():
    shadow = sampler_precision(parse("phantom,loss_scale=static:8"))
    assert (shadow.params, shadow.compute, shadow.activations) == (jnp.bfloat16,) * 3
    assert (shadow.logits, shadow.loss_scale) == (jnp.float32, LossScaleSpec())


def test_shadow_has_the_samplers_attention_form():
    forms = {name: sampler_precision(parse(f"fp32,latent={name}")).latent for name in LATENT}
    assert forms == {"expanded": "expanded", "sampler": "absorbed", "absorbed": "absorbed"}
    assert disagreement(parse("bf16_master,latent=absorbed")) is None
    with pytest.raises(ValueError, match="latent='narrow' is not a form; use one of expanded, sam"):
        parse("fp32,latent=narrow")
    with pytest.raises(ValueError, match="two forms of attention round differently"):
        parse("fp32,latent=sampler,sums=fixed")


def test_cast_leaves_integers_alone():
    tree = {"w": jnp.ones(2), "ids": jnp.arange(2), "key": jax.random.key(0)}
    halves = cast(tree, jnp.dtype(jnp.float16))
    assert (halves["w"].dtype, halves["ids"].dtype) == (jnp.float16, jnp.int32)
    assert halves["key"].dtype == tree["key"].dtype


def reference(spec, finite_steps):
    """The state machine in plain Python."""
    scale, good, skipped = spec.initial, 0, 0
    for finite in finite_steps:
        if not finite:
            scale = max(scale * spec.backoff, spec.floor) if spec.backoff != 1 else scale
            good, skipped = 0, skipped + 1
        elif good + 1 >= spec.interval:
            scale, good = (scale * spec.growth if spec.growth != 1 else scale), 0
        else:
            good += 1
    return scale, good, skipped


@pytest.mark.parametrize("spec", [dynamic_loss_scale(8.0, 3), LossScaleSpec(initial=0.25)])
def test_loss_scale_state_machine(spec):
    step = jax.jit(lambda state, finite: update_loss_scale(state, finite, spec=spec))

    @settings(quick, max_examples=20)
    @given(st.lists(st.booleans() | st.just(True), max_size=30))
    def check(finite_steps):
        state = init_loss_scale(spec)
        for finite in finite_steps:
            state = step(state, np.bool_(finite))
        got = (float(state.scale), int(state.good_steps), int(state.skipped))
        assert got == reference(spec, finite_steps)

    check()


def test_scale_stays_between_its_floor_and_infinity():
    spec = dynamic_loss_scale(2.0**125, 1)
    step = jax.jit(lambda state, finite: update_loss_scale(state, finite, spec=spec))
    state = init_loss_scale(spec)
    for _ in range(5):
        state = step(state, np.True_)
    assert state.scale == 2.0**126
    for _ in range(130):
        state = step(state, np.False_)
    assert (state.scale, state.skipped) == (1.0, 130)


def test_a_scale_below_its_floor_does_not_rise_on_overflow():
    spec = dynamic_loss_scale(0.25)
    assert update_loss_scale(init_loss_scale(spec), jnp.bool_(False), spec=spec).scale == 0.25


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16_master", "fp16_master"])
def test_presets_with_a_matched_sampler_agree(name):
    assert disagreement(PRESETS[name]) is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("phantom", r"compute = f32, activations = f32 and sampler = bf16.*'bf16_master'"),
        ("fp32,sampler=f16", r"sampler = f16.*'fp16_master'"),
        ("fp32,wire=bf16", r"^wire = bf16 and sampler = f32.*'fp32'"),
        ("bf16_master,activations=f32", r"^activations = f32 and sampler = bf16"),
        ("fp16_master,wire=bf16", r"^wire = bf16 and sampler = f16"),
        ("bf16_master,wire=f8_e4m3", r"^wire = f8_e4m3 and sampler = bf16"),
        ("bf16_master,latent=sampler", r"^latent = sampler.*beta.*\.014 in bf16.*latent=absorbed$"),
        ("phantom,latent=sampler", r"^latent = sampler.*; compute = f32"),
    ],
)
def test_disagreement_names_roles_and_cure(text, named):
    assert re.search(named, disagreement(parse(text)))


def test_eight_bits_are_for_the_wire_alone():
    precision = parse("bf16_master,wire=f8_e4m3")
    assert parse(str(precision)) == precision
    assert precision.exported == precision.sampler
    assert parse("bf16_master,wire=f32").exported == jnp.float32
    with pytest.raises(ValueError, match=r"moments=f16: squares of gradients .* use f32 or bf16"):
        parse("bf16_master,moments=f16")
    with pytest.raises(ValueError, match="compute=f8_e4m3: nothing is computed in 8 bits"):
        parse("fp32,compute=f8_e4m3")


def test_a_wider_wire_loses_nothing():
    assert disagreement(parse("bf16_master,wire=f32")) is None
