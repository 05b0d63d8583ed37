"""Compiled functions that keep every cast of a dtype policy.

XLA may leave out a rounding to 16 bits between two operations in f32, unless it is told not to.
That option holds for a whole program, so a function compiled here is called by itself, never inside
another transformation.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax

from jaxrl.core.compiler_flags import compiler_flags
from jaxrl.core.precision import SUMS, Precision


def jit(
    function: Callable[..., Any], *, sums: str = "any", device: Any = None, **options: Any
) -> Any:
    """Compiles as `jax.jit` does, keeps every cast, and sets `compiler_flags`.

    Compile once, outermost: write a loop over steps or a sweep of states as a function that calls
    the plain one, and compile that. `jax.jit` may leave out a rounding that the policy names.

    Example:
      >>> import jax.numpy as jnp
      >>> third = jnp.float32(1) / 3
      >>> float(jit(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32))(third))
      0.333984375

    Args:
      function: the function to compile.
      sums: as in the dtype policy that the function computes with.
      device: one `jax.Device` of those to compile for; by default the first of `jax.devices()`.
      options: options of `jax.jit`.

    Returns:
      The compiled function, with the methods of `jax.jit`'s. It raises ValueError if it is called
      inside another compiled or differentiated function.
    """
    device = jax.devices()[0] if device is None else device
    compiler = _compiler_options(sums) | compiler_flags(device)
    if device.platform == "cpu":
        # The pass converts the saved activations of all layers from bf16 to f32 before the loop.
        compiler["xla_disable_hlo_passes"] = "while-loop-invariant-code-motion"
    return _outermost(function, compiler_options=compiler, **options)


def jit_forward(function: Callable[..., Any], *, sums: str = "any", **options: Any) -> Any:
    """Compiles as `jit` does, but does not initialise the devices: modules may decorate with it."""
    return _outermost(function, compiler_options=_compiler_options(sums), **options)


def keep_collectives_ordered() -> None:
    """Turns JAX's cache of compiled programs off where devices may hang with it.

    A program for several CPU devices that XLA reads back has lost the order of its collectives
    (docs/internals/xla.md). PJRT_NPROC, with a thread for each collective that may wait, keeps the
    cache. It must run before anything compiles.
    """
    several = jax.default_backend() == "cpu" and jax.device_count() > 1
    if several and "PJRT_NPROC" not in os.environ:
        jax.config.update("jax_enable_compilation_cache", False)


def _outermost(function: Callable[..., Any], **options: Any) -> Any:
    """Compiles as `jax.jit` does, and explains JAX's refusal to call a program with compiler
    options inside another one."""
    compiled: Any = jax.jit(function, **options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except ValueError as error:
            if "can only be passed to top-level" not in str(error):
                raise
            name = getattr(function, "__name__", "a function")
            raise ValueError(
                f"{name} is compiled by jaxrl.jit, but was called inside another compiled or "
                "differentiated function, where its roundings could be left out; compile once, "
                "outermost, with jaxrl.jit, and call the plain function inside your own, such as "
                "learner.step"
            ) from None

    whole: Any = call
    for method in ("lower", "trace", "eval_shape", "clear_cache", "_cache_size"):
        setattr(whole, method, getattr(compiled, method))
    return whole


def _compiler_options(sums: str) -> dict[str, Any]:
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if sums == "fixed":
        # XLA picks the CPU's kernel library by an array's size, and it sums in another order.
        options["xla_cpu_experimental_ynn_fusion_type"] = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
    return options


def jit_by_precision(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a function whose static argument `precision` selects the compiled program. The
    result has `jax.jit`'s method `lower`."""

    def decorate(function: Callable[..., Any]) -> Any:
        programs = {sums: jit_forward(function, sums=sums, **options) for sums in SUMS}

        def call(*args: Any, precision: Precision, **kwargs: Any) -> Any:
            return programs[precision.sums](*args, precision=precision, **kwargs)

        def lower(*args: Any, precision: Precision, **kwargs: Any) -> Any:
            return programs[precision.sums].lower(*args, precision=precision, **kwargs)

        compiled: Any = functools.wraps(function)(call)
        compiled.lower = lower
        return compiled

    return decorate
