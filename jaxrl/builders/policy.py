"""Opens a policy outside a run: fixed weights and their sampler."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from jaxrl.builders.layout import make_layout, prepare_devices
from jaxrl.builders.model import check_precision, load_model
from jaxrl.builders.sampler import SamplerNeeds, open_sampler
from jaxrl.builders.weight_sync import WeightRoute
from jaxrl.config.mesh import MeshConfig
from jaxrl.config.sampler import SamplerConfig
from jaxrl.core import Precision
from jaxrl.huggingface import Checkpoint
from jaxrl.sampling import Sampler


@contextmanager
def open_policy(
    checkpoint: Checkpoint,
    sampler: SamplerConfig,
    *,
    mesh: MeshConfig,
    precision: Precision,
    needs: SamplerNeeds,
    note: Callable[[str], None],
) -> Iterator[Sampler]:
    """Loads a checkpoint and opens its sampler for the block. Call it before jax looks for devices.

    To running servers this is a new learner, so they refuse its weights while a run uses them.
    `note` shows a line to the user. Raises as `check_precision`, `make_layout`, `load_model` and
    `open_sampler`.
    """
    check_precision("precision", precision, checkpoint.config)
    prepare_devices(mesh, sampler)
    layout = make_layout(mesh, precision=precision, apart={"sampler.devices": sampler.devices})
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
        yield serving.sampler
