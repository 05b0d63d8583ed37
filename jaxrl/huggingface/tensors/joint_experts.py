"""Tensors that hold all experts of a layer, read as one tensor per expert.

The published files of Qwen3.5's mixtures have two for each layer: `experts.gate_up_proj`
[experts, 2 * units, hidden], with gate's rows before up's, and `experts.down_proj`
[experts, hidden, units]. They stand for `experts.N.gate_proj.weight`, `experts.N.up_proj.weight`
and `experts.N.down_proj.weight`, which transformers writes.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl.huggingface.files import StoredTensor, Tensor
from jaxrl.models.spec import ParamSpec

# Expert's tensor -> (joint tensor, number of an expert's tensors in it, index among them).
_JOINT = {
    "gate_proj.weight": ("gate_up_proj", 2, 0),
    "up_proj.weight": ("gate_up_proj", 2, 1),
    "down_proj.weight": ("down_proj", 1, 0),
}


class ExpertTensor(NamedTuple):
    """A matrix of one expert in a joint tensor, read on demand; see `StoredTensor`."""

    path: Path
    joint: StoredTensor
    joint_shape: tuple[int, ...]  # the expected one
    expert: int
    rows: slice  # of the expert, in the joint tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape."""
        return (self.rows.stop - self.rows.start, self.joint_shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.joint.nbytes * math.prod(self.shape) // math.prod(self.joint_shape)

    def read(self, *, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Reads the matrix; raises ValueError if the joint tensor has another shape or is not
        readable."""
        assert shape in (None, self.shape)  # both come from the parameter
        part = (slice(self.expert, self.expert + 1), self.rows)
        return self.joint.read(shape=self.joint_shape, part=part)[0]


def split_experts(tensors: Mapping[str, Tensor], specs: Iterable[ParamSpec]) -> dict[str, Tensor]:
    """Replaces the joint tensors of the decoder's layers by one tensor per expert.

    Raises:
      ValueError: if a checkpoint has both.
    """
    split, joined = dict(tensors), set[str]()
    for one in specs:
        before, _, own = one.name.partition(".{expert}.")
        if own not in _JOINT:
            continue
        name, parts, place = _JOINT[own]
        layers, count, rows, width = one.shape
        shape = (count, parts * rows, width)
        for layer in range(one.first, one.first + layers * one.step, one.step):
            joint = tensors.get(f"{before}.{name}".format(layer=layer))
            if not isinstance(joint, StoredTensor):
                continue
            joined.add(joint.name)
            for expert in range(count):
                path = one.name.format(layer=layer, expert=expert)
                if path in tensors:
                    raise ValueError(
                        f"{joint.path}: tensor {joint.name!r} holds {path!r}, which is also in "
                        f"{tensors[path].path}; delete one of them"
                    )
                inside = slice(place * rows, (place + 1) * rows)
                split[path] = ExpertTensor(joint.path, joint, shape, expert, inside)
    return {name: one for name, one in split.items() if name not in joined}
