"""Opens a policy outside a run: weights that do not change, and a sampler of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from jaxrl.builders.layout import divide_cpu, make_layout
from jaxrl.builders.model import load_model
from jaxrl.builders.sampler import SamplerNeeds, open_sampler
from jaxrl.builders.weight_sync import WeightRoute
from jaxrl.config.mesh import MeshConfig
from jaxrl.config.sampler import SamplerConfig
from jaxrl.core import Precision
from jaxrl.huggingface import Checkpoint
from jaxrl.models import Model, Params
from jaxrl.sampling import Sampler


class Policy(NamedTuple):
    """A language model with its weights on the devices, and what samples from it."""

    checkpoint: Checkpoint
    model: Model
    params: Params  # in `precision.params`, sharded by the mesh
    sampler: Sampler


@contextmanager
def open_policy(
    checkpoint: Checkpoint,
    sampler: SamplerConfig,
    *,
    mesh: MeshConfig,
    precision: Precision,
    needs: SamplerNeeds,
    note: Callable[[str], None],
) -> Iterator[Policy]:
    """Loads a checkpoint and opens the config's sampler of it, until the end of the block. Call it
    before jax looks for devices.

    The learner's identity at running servers is new, so they refuse these weights while a run uses
    them. `note` shows a line to the user.

    Raises:
      FileNotFoundError, ValueError: as `make_layout`, `load_model` and `open_sampler`.
      ServerFailedError, RefusedError: as `open_sampler`.
    """
    divide_cpu(mesh, sampler)
    layout = make_layout(mesh, precision=precision, reserved=sampler.devices)
    model, params = load_model(checkpoint, layout=layout, dtype=precision.params)
    with (
        TemporaryDirectory(prefix="jaxrl-") as directory,  # for the log of a server
        open_sampler(
            sampler,
            WeightRoute(model, params, 0, precision, checkpoint),
            layout=layout,
            needs=needs,
            directory=Path(directory),
            note=note,
        ) as serving,
    ):
        yield Policy(checkpoint, model, params, serving.sampler)
