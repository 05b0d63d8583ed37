"""Digests of arrays and of checkpoints: no change passes, no sharding matters."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxrl.learner import digests
from jaxrl.learner.checkpoints import CheckpointError, Checkpoints
from jaxrl.sharding.mesh import make_mesh
from jaxrl.sharding.partition import Layout
from jaxrl.sharding.rules import PRESETS

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "uint8", "bool")


def noise(*shape, dtype="float32"):
    return jnp.asarray(9 * np.random.default_rng(0).normal(size=shape), dtype)


def digest(x):
    return digests.tree_digests({"x": x})["x"]


@given(dtype=st.sampled_from(DTYPES[:-1]), data=st.data())
@settings(max_examples=100, deadline=None)
def test_every_flipped_bit_changes_the_digest(dtype, data):
    x = np.asarray(noise(7, 11, dtype=dtype))
    damaged = bytearray(x.tobytes())
    place = data.draw(st.integers(0, 8 * len(damaged) - 1))
    damaged[place // 8] ^= 1 << place % 8
    other = np.frombuffer(bytes(damaged), x.dtype).reshape(x.shape)
    assert digests._local(other).tolist() != digests._local(x).tolist()


@given(places=st.lists(st.integers(0, 76), min_size=2, max_size=2, unique=True))
@settings(max_examples=50, deadline=None)
def test_elements_that_change_places_change_the_digest(places):
    x = np.arange(77, dtype=np.float32).reshape(7, 11)
    i, j = places
    y = x.copy().reshape(-1)
    y[[i, j]] = y[[j, i]]
    assert digests._local(x).tolist() != digests._local(y.reshape(7, 11)).tolist()
    assert digests._local(x).tolist() != digests._local(-x).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_programs_and_numpy_agree(dtype):
    x = noise(3, 5, 7, dtype=dtype)
    assert np.asarray(digests._on_devices(x)).tolist() == digests._local(x).tolist()


def test_sharding_and_memory_do_not_matter():
    x = noise(512, 256)
    expected = "".join(f"{part:08x}" for part in digests._local(x))
    spread = Layout(make_mesh(fsdp=4, tensor=2), PRESETS["fsdp_tensor"])
    place = spread.sharding(("vocab", "embed"))
    for sharding in (
        place,
        place.with_memory_kind("pinned_host"),
        spread.sharding(("layers", "norm")),
    ):
        assert digest(jax.device_put(x, sharding)) == expected


def test_scalars_and_empty_arrays_have_digests():
    found = digests.tree_digests({"a": jnp.int32(3), "b": jnp.int32(4), "c": jnp.zeros((0, 3))})
    assert len(set(found.values())) == 3


# Orbax drops the reads of other arrays where one fails, and Python reports them at any time.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_flipped_bits_never_load(tmp_path):
    """The files of a checkpoint, one flipped bit each: the same bits, or an error that names it."""
    gc.freeze()  # so that the end collects what this test makes, and nothing of the tests before
    state = {"params": noise(64, 48), "bytes": noise(4096, dtype="uint8")}
    host = {"position": 17, "text": "abc"}
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, state, host=host)
    checkpoints.close()
    rng, refused = np.random.default_rng(1), 0
    files = sorted(p for p in (tmp_path / "checkpoints" / "1").rglob("*") if p.stat().st_size)
    files = [path for path in files if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    for path in (*files, *[largest] * 12):
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            opened = Checkpoints.reading(tmp_path / "checkpoints")
            found = opened.restore(1, state)
        except CheckpointError as error:
            assert "checkpoints" in str(error)  # noqa: PT017
            refused += 1
        else:
            assert found.host == host
            for name, x in state.items():
                assert np.asarray(found.state[name]).tobytes() == np.asarray(x).tobytes(), path
        path.write_bytes(content)
    assert refused >= 12
    gc.collect()  # what was dropped is reported here, where it is expected


def test_damaged_array_names_the_checkpoint_before(tmp_path):
    state = {"params": {"a": noise(8, 8), "b": noise(8, 8)}}
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (4, 6):
        checkpoints.save(step, state, host={})
    other = {"params": state["params"] | {"b": -state["params"]["b"]}}
    with pytest.MonkeyPatch.context() as patch:
        right = digests.seal({}, {"state": other})
        patch.setattr("jaxrl.learner.checkpoints.seal", lambda *_: right)
        checkpoints.save(9, state, host={})
    expected = (
        r"checkpoints/9 is damaged: the array state/params/b is not what was saved\. To resume "
        r"from step 6, the checkpoint before it, run: mv \S+/checkpoints/9 \S+/damaged_9"
    )
    with pytest.raises(CheckpointError, match=expected):
        checkpoints.restore(9, state)
    checkpoints.close()


@pytest.mark.parametrize("change", ["host", "arrays", "blake2b"])
def test_damaged_host_state_is_refused(change):
    sealed = digests.seal({"position": 3}, {"state": {"x": noise(2)}})
    assert digests.unseal(sealed)[0] == {"position": 3}
    for damaged in (sealed | {change: {"position": 4}}, {**sealed, change: None}):
        with pytest.raises(digests.DamagedError):
            digests.unseal(damaged)
    sealed.pop(change)
    with pytest.raises(digests.DamagedError):
        digests.unseal(sealed)
