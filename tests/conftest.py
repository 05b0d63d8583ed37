"""Eight CPU devices, warnings are errors, rank promotion raises."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"

import jax
from hypothesis import settings

jax.config.update("jax_numpy_rank_promotion", "raise")

# A shared machine is slow at times, and a test must not pass or fail by chance.
settings.register_profile("jaxrl", deadline=None, derandomize=True)
settings.load_profile("jaxrl")
