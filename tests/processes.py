"""How tests compile, and the command line in processes of their own."""

import sys

# Most of the time goes into compiling. Without LLVM's optimisations, by the old emitters and in one
# piece it takes a sixth, and the program that is compiled stays the same. The emitters are chosen
# by an extra option: jaxlib 0.11 aborts at the flag xla_cpu_use_fusion_emitters.
XLA_FLAGS = (
    "--xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1"
)


def with_eight_devices(flags: str) -> str:
    """Adds the tests' flags, unless a worker inherited them: they are part of the cache's keys."""
    more = f"{XLA_FLAGS} --xla_force_host_platform_device_count=8"
    return flags if more in flags else f"{flags} {more}"


# `jaxrl` without torch, which transformers would import: seconds in each process.
JAXRL = (
    sys.executable,
    "-c",
    "import sys; sys.modules['torch'] = None; from jaxrl import cli; sys.exit(cli.main())",
)
