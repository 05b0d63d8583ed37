"""Devices to compile for, and the compile cache."""

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from jaxrl.commands.plan.chips import CHIPS
from jaxrl.commands.plan.topology import Topology, open_topology


@pytest.mark.parametrize("name", ["v5p", "v5p:", "v9:2x2", "cpu:0", "v5e:4x4x4x4", "h100:2x2x2"])
def test_unknown_topology_is_an_error(name):
    with pytest.raises(ValueError, match="expected v5p:4x4x4"):
        open_topology(name)


def test_missing_compiler_error_names_the_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jax\[tpu\]'"):
        open_topology("v5e:2x2")


def test_only_programs_for_absent_chips_pass_the_compile_cache(tmp_path):
    """Others that the same process compiles later, such as those of the doctor's beta, use it."""
    keys = {"jax_compilation_cache_dir": str(tmp_path)}
    keys |= {"jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {key: getattr(jax.config, key) for key in keys}
    given, absent = np.zeros(8), Topology(name="v5p:1x1x1", chip=CHIPS["v5p"], devices=[])
    try:
        for key, value in keys.items():
            jax.config.update(key, value)
        reset_cache()
        absent.compile(jax.jit(lambda x: x + 1).lower(given))
        assert not list(tmp_path.iterdir())
        jax.jit(lambda x: x + 2).lower(given).compile()
        assert list(tmp_path.iterdir())
    finally:
        for key, value in before.items():
            jax.config.update(key, value)
        reset_cache()
