"""The `[mesh]` table of a config: how many devices along which axis, and what they cut."""

import math
from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from jaxrl.config.tables import Section, Texts
from sharding.mesh import AXES
from sharding.rules import PRESETS, Rules, change

MeshRules = Literal["data", "fsdp", "tensor", "fsdp_tensor", "expert", "context", "all"]


class MeshConfig(Section):
    """Devices; the product must be their number."""

    data: PositiveInt = 1
    """Copies of the model, each with its part of a batch."""

    fsdp: PositiveInt = 1
    """Shards of parameters and optimizer state, each with its part of a batch."""

    expert: PositiveInt = 1
    """Shards of the experts, each with its part of a batch."""

    context: PositiveInt = 1
    """Shards of the tokens of a row."""

    tensor: PositiveInt = 1
    """Shards of every matrix product."""

    rules: MeshRules = "all"
    """What is cut over which axis: a preset of sharding/rules.py. `all` cuts over every axis."""

    parameters: Texts = ()
    """Changes to the rules for parameters, such as `embed=fsdp+context`, or `vocab=` to leave an
    axis whole."""

    activations: Texts = ()
    """Changes to the rules for batches and activations, such as `length=context`."""

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def batch_shards(self) -> int:
        """Parts that a batch's rows are cut into."""
        return self._parts("batch")

    @property
    def row_shards(self) -> int:
        """Parts that the tokens of a row are cut into."""
        return self._parts("length")

    def _parts(self, logical: str) -> int:
        return math.prod(self.sizes[axis] for axis in dict(self.layout_rules.activations)[logical])

    @property
    def layout_rules(self) -> Rules:
        """The preset with the changes."""
        return change(PRESETS[self.rules], parameters=self.parameters, activations=self.activations)

    @model_validator(mode="after")
    def _rules_fit(self) -> Self:
        rules = self.layout_rules
        used = {axis for _, axes in (*rules.parameters, *rules.activations) for axis in axes}
        if unknown := sorted(used - set(AXES)):
            raise ValueError(f"a rule names the mesh axis {unknown[0]!r}; expected {AXES}")
        idle = [
            f"mesh.{axis} = {n}" for axis, n in self.sizes.items() if n > 1 and axis not in used
        ]
        if idle:
            raise ValueError(
                f"{', '.join(idle)}: the rules {self.rules!r} cut nothing over it, so its devices "
                "would repeat one another's work; choose other mesh.rules or set it to 1"
            )
        return self
