import gc
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct

from jaxrl.core.loss_scale import LossScale, LossScaleSpec, init_loss_scale
from jaxrl.learner.checkpoints import CheckpointError, Checkpoints
from jaxrl.models.spec import ParamSpec, abstract
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS

SPECS = {
    "embed": ParamSpec((64, 16), ("vocab", "embed"), "embed", 1.0),
    "layers": {
        "q": ParamSpec((2, 16, 32), ("layers", "q_heads", "embed"), "q", 1.0),
        "norm": ParamSpec((2, 16), ("layers", "norm"), "norm", None),
    },
}
TX = optax.multi_transform(
    {"matrix": optax.adam(1e-2), "vector": optax.sgd(1e-2)},
    {"embed": "matrix", "layers": {"q": "matrix", "norm": "vector"}},
)
HOST = {"position": 17, "seed": 2**70, "best": 0.1 + 0.2, "order": [3, 1, 2], "policy": {"v": 4}}


@struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: optax.OptState
    loss_scale: LossScale


def make_state(*, seed=0, specs=SPECS, dtype="float32", tx=TX):
    """Random numbers everywhere, without compiling anything."""
    params = abstract(specs, dtype=jnp.dtype(dtype))
    shapes = jax.eval_shape(
        lambda p: State(jnp.int32(0), p, tx.init(p), init_loss_scale(LossScaleSpec())), params
    )
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.array(9 * rng.normal(size=s.shape), s.dtype), shapes)


def put(state, layout):
    return jax.device_put(state, layout.state(state, SPECS))


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)

    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def single():
    return Layout(make_mesh(devices=jax.devices()[:1]), PRESETS["fsdp"])


@pytest.fixture
def checkpoints(tmp_path):
    opened = Checkpoints(tmp_path / "checkpoints", keep=2, keep_best=1)
    yield opened
    opened.close()


def test_restored_equals_saved(checkpoints):
    state = make_state(seed=3)
    checkpoints.save(7, state, host=HOST)
    restored = checkpoints.restore(7, state)
    assert_same_bits(state, restored.state)
    assert restored.host == HOST


def test_critic_is_restored_only_on_request(checkpoints):
    state, critic = make_state(seed=3), make_state(seed=4)
    checkpoints.save(7, state, host=HOST, critic=critic)
    assert_same_bits(critic, checkpoints.restore(7, state, critic=critic).critic)
    assert checkpoints.restore(7, state).critic is None
    checkpoints.save(8, state, host=HOST)
    with pytest.raises(CheckpointError, match="critic"):
        checkpoints.restore(8, state, critic=critic)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_and_non_finite_values_keep_bits(checkpoints, dtype):
    state = make_state(dtype=dtype)
    odd = np.array([np.nan, np.inf, -0.0, 1e-7, 1e-4], dtype)
    state.params["layers"]["norm"] = jnp.array(np.resize(odd, (2, 16)))
    checkpoints.save(1, state, host={})
    assert_same_bits(state, checkpoints.restore(1, state).state)


def test_checkpoint_restores_on_another_mesh(checkpoints):
    state = make_state(seed=5)
    layouts = [
        Layout(make_mesh(fsdp=8), PRESETS["fsdp"]),
        Layout(make_mesh(fsdp=2, tensor=4), PRESETS["fsdp_tensor"]),
        Layout(make_mesh(data=8), PRESETS["data"]),
        single(),
    ]
    here = put(state, layouts[0])
    shapes = jax.eval_shape(lambda: state)
    for step, layout in enumerate(layouts):
        shardings = layout.state(shapes, SPECS)
        like = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
        )
        checkpoints.save(step, here, host={})
        here = checkpoints.restore(step, like).state
        assert_same_bits(state, here)
        assert jax.tree.map(lambda x: x.sharding, here) == shardings


@pytest.mark.parametrize(("devices", "memory"), [(1, "device"), (8, "device"), (8, "pinned_host")])
def test_state_may_be_donated_during_a_save(checkpoints, devices, memory):
    cut = Layout(make_mesh(fsdp=-1, devices=jax.devices()[:devices]), PRESETS["fsdp"])
    place = cut.sharding(("vocab", "embed")).with_memory_kind(memory)
    state = jax.device_put(
        {"x": np.random.default_rng(0).normal(size=(4096, 512)).astype(np.float32)}, place
    )
    near = jax.memory.Space.Device
    overwrite = jax.jit(
        lambda p: jax.tree.map(lambda x: -2.0 * jax.device_put(x, near), p),
        donate_argnums=0,
        out_shardings=place,
    )
    for step in range(4):
        before = np.array(state["x"], copy=True)
        checkpoints.save(step, state, host={})
        for _ in range(3):
            state = overwrite(state)
        restored = checkpoints.restore(step, state).state
        assert_same_bits({"x": before}, restored)
        assert restored["x"].sharding == place
    donated = state
    overwrite(donated)
    assert donated["x"].is_deleted()


def test_latest_and_best_are_kept(checkpoints):
    state = {"x": jnp.zeros(2)}
    assert checkpoints.latest_step() is None
    assert checkpoints.best_step() is None
    for step, metric in enumerate([None, 0.25, 0.75, None, 0.5, 0.75, 0.5, None, None]):
        checkpoints.save(step, state, host={}, metric=metric)
    checkpoints.wait()
    assert sorted(int(p.name) for p in checkpoints.directory.iterdir()) == [5, 7, 8]
    assert (checkpoints.latest_step(), checkpoints.best_step()) == (8, 5)
    again = Checkpoints.reading(checkpoints.directory)
    assert (again.latest_step(), again.best_step()) == (8, 5)
    with pytest.raises(ValueError, match="opened for reading"):
        again.save(9, state, host={})
    again.close()


def test_keep_best_zero_keeps_only_the_latest(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=0)
    for step in range(3):
        checkpoints.save(step, {"x": jnp.zeros(2)}, host={}, metric=-step)
    checkpoints.close()
    assert [p.name for p in tmp_path.iterdir()] == ["2"]


def test_leftovers_of_a_killed_process_go(tmp_path):
    """It has nothing to save, so it deletes when it closes."""
    with closing(Checkpoints(tmp_path, keep=9)) as killed:
        for step, metric in ((1, 0.5), (2, 0.5), (3, None), (4, 0.25), (5, None)):
            killed.save(step, {"x": jnp.zeros(1)}, host={}, metric=metric)
    expected = {(4, 9): "12345", (2, 1): "245", (1, 1): "25", (1, 0): "5"}
    for (keep, keep_best), left in expected.items():
        Checkpoints(tmp_path, keep=keep, keep_best=keep_best).close()
        assert sorted(path.name for path in tmp_path.iterdir()) == [*left]


def test_unsavable_arguments_are_immediate_errors(checkpoints):
    state = {"x": jnp.zeros(2)}
    checkpoints.save(4, state, host={})
    with pytest.raises(ValueError, match=r"step 4 is not new: .* holds 4"):
        checkpoints.save(4, state, host={})
    with pytest.raises(ValueError, match="metric=nan at step 5"):
        checkpoints.save(5, state, host={}, metric=float("nan"))
    with pytest.raises(TypeError, match="int64 is not JSON serializable"):
        checkpoints.save(5, state, host={"position": np.int64(3)})
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(checkpoints.directory, keep=0)


def test_missing_step_is_an_error(checkpoints, tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint .*/checkpoints/3; steps there: none"):
        checkpoints.restore(3, {})
    checkpoints.save(1, {"x": jnp.zeros(2)}, host={})
    with pytest.raises(CheckpointError, match=r"no checkpoint .*/checkpoints/3; steps there: 1"):
        checkpoints.restore(3, {"x": jnp.zeros(2)})
    with pytest.raises(CheckpointError, match=r"there are no checkpoints: .*nowhere"):
        Checkpoints.reading(tmp_path / "nowhere")


def test_mismatched_arrays_are_named(checkpoints):
    checkpoints.save(1, make_state(), host={})
    wider = {**SPECS, "embed": SPECS["embed"]._replace(shape=(64, 32))}
    deeper = {**SPECS, "head": SPECS["embed"]}
    sgd = optax.sgd(1e-2, momentum=0.9)
    labels = {"embed": "matrix", "head": "matrix", "layers": {"q": "matrix", "norm": "vector"}}
    both = optax.multi_transform({"matrix": optax.adam(1e-2), "vector": optax.sgd(1e-2)}, labels)
    for state, message in [
        (
            make_state(specs=wider),
            r"params/embed is float32\[64, 16\] in the checkpoint and float32\[64, 32\]",
        ),
        (make_state(dtype="float16"), r"params/embed is float32.* and float16\[64, 16\]"),
        (make_state(specs=deeper, tx=both), r"params/head is missing in the checkpoint"),
        (make_state(tx=sgd), r"opt_state/0/trace/embed is missing in the checkpoint"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            checkpoints.restore(1, state)


# Coroutines that the reader abandons at the first error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["truncate", "flip", "arrays", "metadata", "host"])
def test_damaged_checkpoint_is_named_and_others_restore(tmp_path, damage):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    states = {step: make_state(seed=step) for step in (1, 2)}
    for step, state in states.items():
        checkpoints.save(step, state, host={"n": step})
    checkpoints.close()
    root = tmp_path / "checkpoints" / "2"
    arrays = max((root / "state").rglob("d/*"), key=lambda p: p.stat().st_size)
    if damage == "truncate":
        os.truncate(arrays, arrays.stat().st_size // 2)
    elif damage == "flip":
        data = bytearray(arrays.read_bytes())
        for i in range(100, len(data), 50):
            data[i] ^= 0xFF
        arrays.write_bytes(data)
    elif damage == "host":
        (root / "host" / "metadata").write_text('{"n": ')
    elif damage == "arrays":
        shutil.rmtree(root / "state" / "d")
    else:
        (root / "state" / "_METADATA").unlink()
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    expected = (
        r"checkpoints/2 (cannot be read|is damaged): .+ To resume from step 1, the checkpoint "
        r"before it, run: mv \S+/checkpoints/2 \S+/damaged_2$"
    )
    with pytest.raises(CheckpointError, match=re.compile(expected, re.DOTALL)):
        checkpoints.restore(2, states[2])
    restored = checkpoints.restore(1, states[1])
    assert_same_bits(states[1], restored.state)
    assert restored.host == {"n": 1}
    checkpoints.close()
    gc.collect()  # here, where their warnings are ignored


def test_unreadable_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/checkpoints cannot be opened: NotADir"):
        Checkpoints(tmp_path / "file" / "checkpoints")


def save_and_wait(checkpoints, step, state):
    checkpoints.save(step, state, host={})
    checkpoints.wait()


def test_full_disk_keeps_the_last_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=0)
    noise = jax.random.normal(jax.random.key(0), (256, 1024))
    checkpoints.save(1, {"x": noise}, host={"n": 1})
    checkpoints.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))  # a file may not grow beyond
        with pytest.raises(CheckpointError, match=f"saving to {tmp_path} failed; .*checkpoints: 1"):
            save_and_wait(checkpoints, 2, {"x": -noise})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints.latest_step() == 1
    restored = checkpoints.restore(1, {"x": noise})
    assert_same_bits(restored.state, {"x": noise})
    checkpoints.save(2, {"x": -noise}, host={"n": 2})
    assert_same_bits(checkpoints.restore(2, {"x": noise}).state, {"x": -noise})
    checkpoints.close()
    assert [p.name for p in tmp_path.iterdir()] == ["2"]


SAVE_FOREVER = """
import sys, jax.numpy as jnp
from jaxrl.learner.checkpoints import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
for step in range(1, 10_000):
    checkpoints.save(step, {"x": jnp.full((512, 512), step)}, host={"step": step})
    print(step, flush=True)
"""


def test_killed_save_leaves_complete_checkpoints(tmp_path, request):
    kills = {}
    for name, seconds in {"a": 0.0, "b": 0.31}.items():
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(tmp_path / name)],
            stdout=subprocess.PIPE,
            text=True,
        )
        request.addfinalizer(process.kill)
        kills[name] = (process, seconds)
    for name, (process, seconds) in kills.items():
        for _ in range(3):
            started = int(process.stdout.readline())
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        started = max([started, *map(int, process.stdout.read().split())])
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        checkpoints = Checkpoints(tmp_path / name)
        latest = checkpoints.latest_step()
        assert latest in (started - 1, started, started + 1)
        restored = checkpoints.restore(latest, {"x": jnp.zeros((512, 512), jnp.int32)})
        np.testing.assert_array_equal(restored.state["x"], latest)
        assert restored.host == {"step": latest}
        checkpoints.save(latest + 1, restored.state, host={})
        checkpoints.close()
        assert all(path.name.isdigit() for path in (tmp_path / name).iterdir())


def test_killed_deletion_leaves_no_half_checkpoint(tmp_path):
    """A deleted checkpoint leaves its name first; the next writer removes the rest."""
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=0)
    left = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: left.append(path))
        for step in (1, 2):
            checkpoints.save(step, {"x": jnp.zeros(2)}, host={})
        checkpoints.close()
    assert {path.name for path in tmp_path.iterdir()} == {"2", "deleted"}
    assert left[-1] == tmp_path / "deleted"
    checkpoints = Checkpoints(tmp_path, keep=1, keep_best=0)
    assert checkpoints.latest_step() == 2
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
