"""The tables of a config that describe meshes."""

import math
from collections.abc import Iterator

from pydantic import NonNegativeInt, PositiveInt

from jaxrl.config.section import Section, Texts
from jaxrl.sharding import AXES, PRESETS, Rules, by_rows, change


class MeshConfig(Section):
    """Devices along each axis; the product must be the number of devices, or 1 to use one."""

    data: PositiveInt = 1
    """Replicas of the model; the batch is sharded over them."""

    fsdp: PositiveInt = 1
    """Shards of parameters and optimizer state; the batch is sharded over them, too."""

    expert: PositiveInt = 1
    """Shards of the experts; the batch is sharded over them, too."""

    context: PositiveInt = 1
    """Shards of the tokens of a row (context parallelism)."""

    tensor: PositiveInt = 1
    """Shards of every matrix product (tensor parallelism)."""

    parameters: Texts = ()
    """Changes to the rules of parameters, such as `embed=fsdp+context`; `vocab=` for no shards."""

    activations: Texts = ()
    """Changes to the rules of batches and activations, such as `length=context`."""

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    def batch_shards(self, sums: str = "any") -> int:
        """Returns the shards of the rows of a batch, for this order of sums (`precision.sums`)."""
        return self._parts("batch", sums)

    @property
    def row_shards(self) -> int:
        """Shards of the tokens of a row."""
        return self._parts("length", "any")

    def _parts(self, logical: str, sums: str) -> int:
        cut = dict(self.layout_rules(sums).activations)[logical]
        return math.prod(self.sizes[axis] for axis in cut)

    def layout_rules(self, sums: str = "any") -> Rules:
        """Returns the rules of all axes, with the changes; an axis of size 1 is inactive. With
        fixed sums no device has a part of one."""
        rules = change(PRESETS["all"], parameters=self.parameters, activations=self.activations)
        return by_rows(rules) if sums == "fixed" else rules

    def _contradictions(self) -> Iterator[str]:
        rules = self.layout_rules()
        used = {axis for _, axes in (*rules.parameters, *rules.activations) for axis in axes}
        if unknown := sorted(used - set(AXES)):
            yield f"a rule names the mesh axis {unknown[0]!r}; expected {AXES}"


class OwnMeshConfig(MeshConfig):
    """A mesh of its own for a model beside the policy. Its devices follow those of [mesh] and of
    [critic_mesh], [reference_mesh] and [reward_mesh], in this order."""

    data: NonNegativeInt = 0
    """Replicas of the model on devices of its own; the batch is sharded over them. 0: the model is
    on the devices of [mesh]."""

    @property
    def devices(self) -> int:
        """Number of devices; 0 without a mesh."""
        return math.prod(self.sizes.values())

    def _contradictions(self) -> Iterator[str]:
        yield from super()._contradictions()
        given = [f"{axis} = {size}" for axis, size in self.sizes.items() if size > 1]
        if given and not self.data:
            yield f"{given[0]} has no effect while data = 0; set data = 1 or more, or leave it out"
