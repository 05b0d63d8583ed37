"""Logical axes -> shardings, checked: an array is sharded as the rules say or raises."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.rules import MeshAxes, Rules


class Declared(Protocol):
    """The declaration of an array: its shape and logical axes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension."""
        ...

    @property
    def axes(self) -> tuple[str, ...]:
        """The logical name of each dimension."""
        ...


@dataclasses.dataclass(frozen=True)
class Layout:
    """The placement of arrays on a mesh. Hashable, so that compiled functions can close over it.

    `spec`, `sharding` and `tree` use the rules for parameters; `batch` and `constrain` use those
    for activations.

    Attributes:
      mesh: see `mesh.make_mesh`.
      rules: see `rules.PRESETS`.

    Raises:
      ValueError: if a rule names an axis that the mesh does not have.
    """

    mesh: Mesh
    rules: Rules

    def __post_init__(self):
        for logical, axes in (*self.rules.parameters, *self.rules.activations):
            for axis in axes:
                if axis not in self.mesh.shape:
                    raise ValueError(
                        f"the rule {logical!r} -> {axes} names the mesh axis {axis!r}; the mesh "
                        f"has {', '.join(self.mesh.axis_names)}"
                    )

    def spec(self, axes: Sequence[str]) -> PartitionSpec:
        """Returns the partition of a parameter with these logical axes. Mesh axes of size 1 are
        omitted.

        Raises:
          ValueError: if a logical axis has no rule, or two dimensions are cut over one mesh axis.
        """
        return _spec(self.mesh, axes, table=self.rules.parameters)

    def sharding(self, axes: Sequence[str]) -> NamedSharding:
        """Returns `spec` as a sharding on the mesh."""
        return NamedSharding(self.mesh, self.spec(axes))

    @property
    def replicated(self) -> NamedSharding:
        """The whole array on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def axes(self, logical: str) -> MeshAxes:
        """Returns the mesh axes, larger than 1, that a logical axis of activations is cut over."""
        entry = (*self.batch((logical,)).spec, None)[0]
        return (entry,) if isinstance(entry, str) else tuple(entry or ())

    def count(self, logical: str) -> int:
        """Returns the number of parts that a logical axis of activations is cut into."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(logical))

    def batch(self, axes: Sequence[str]) -> NamedSharding:
        """Returns the sharding of an input or an activation with these logical axes."""
        return NamedSharding(self.mesh, _spec(self.mesh, axes, table=self.rules.activations))

    def constrain(self, x: jax.Array, axes: Sequence[str]) -> jax.Array:
        """Constrains the sharding of an activation inside a compiled function; free on one device.

        Args:
          x: of any shape.
          axes: the logical name of each dimension.

        Raises:
          ValueError: as `spec`, and if a dimension does not divide.
        """
        sharding = self.batch(axes)
        _check(x.shape, axes, sharding=sharding, path="activation")
        return x if self.mesh.size == 1 else jax.lax.with_sharding_constraint(x, sharding)

    def local(
        self,
        function: Callable[..., jax.Array],
        *,
        inputs: Sequence[Sequence[str]],
        output: Sequence[str],
    ) -> Callable[..., jax.Array]:
        """Wraps a function so that each device runs it on its own part of the arguments.

        For use inside a compiled function. On one device it is the function itself.

        Args:
          function: of arrays, without communication.
          inputs: logical axes of each argument, by the rules for activations. An argument with
            another sharding is resharded first.
          output: logical axes of the result. The function returns one device's part, which must
            be the same along all mesh axes that these do not name.

        Raises:
          ValueError: as `spec`; at the call, if a dimension does not divide.
        """
        if self.mesh.size == 1:
            return function
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=tuple(self.batch(axes).spec for axes in inputs),
            out_specs=self.batch(output).spec,
            check_vma=False,
        )

    def tree(self, declared: Any) -> Any:
        """Computes the shardings of parameters, in the same tree.

        Args:
          declared: a tree whose leaves have a shape and logical axes (`Declared`).

        Raises:
          ValueError: as `spec`, and if a dimension does not divide; the message names the
            parameter by its path.
        """
        return jax.tree_util.tree_map_with_path(self._declared, declared, is_leaf=_is_declared)

    def state(self, state: Any, declared: Any) -> Any:
        """Computes the shardings of a whole learner state, in the same tree.

        A leaf is sharded like a parameter if its path ends in the parameter's path and the shapes
        are equal: the parameter itself, its moments, its accumulated gradient. Every other leaf is
        replicated.

        Args:
          state: a tree of arrays, or of their shapes (`jax.eval_shape`).
          declared: as in `tree`.

        Raises:
          ValueError: as `tree`.
        """
        leaves, _ = jax.tree_util.tree_flatten_with_path(declared, is_leaf=_is_declared)
        known = [(_parts(path), leaf.shape, self._declared(path, leaf)) for path, leaf in leaves]
        # The longest path first: "layers/embed" is a better match than "embed".
        known.sort(key=lambda parameter: -len(parameter[0]))

        def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            parts = _parts(path)
            for name, shape, sharding in known:
                if parts[-len(name) :] == name and tuple(leaf.shape) == tuple(shape):
                    return sharding
            return self.replicated

        return jax.tree_util.tree_map_with_path(one, state)

    def _declared(self, path: tuple[Any, ...], leaf: Declared) -> NamedSharding:
        name = "/".join(_parts(path))
        try:
            sharding = self.sharding(leaf.axes)
        except ValueError as error:
            raise ValueError(f"parameter {name!r}: {error}") from None
        _check(leaf.shape, leaf.axes, sharding=sharding, path=f"parameter {name!r}")
        return sharding


def _spec(
    mesh: Mesh, axes: Sequence[str], *, table: tuple[tuple[str, MeshAxes], ...]
) -> PartitionSpec:
    rules = dict(table)
    taken: dict[str, str] = {}
    entries: list[str | MeshAxes | None] = []
    for logical in axes:
        if logical not in rules:
            raise ValueError(
                f"axes {tuple(axes)}: there is no rule for {logical!r}; the rules know "
                f"{', '.join(rules)}"
            )
        for axis in rules[logical]:
            if axis in taken:
                raise ValueError(
                    f"axes {tuple(axes)}: {taken[axis]!r} and {logical!r} are both cut over the "
                    f"mesh axis {axis!r}; change one of the two rules"
                )
            taken[axis] = logical
        cut = tuple(axis for axis in rules[logical] if mesh.shape[axis] > 1)
        entries.append(cut[0] if len(cut) == 1 else cut or None)
    while entries and entries[-1] is None:  # the form in which compiled programs report them
        entries.pop()
    return PartitionSpec(*entries)


def _check(
    shape: tuple[int, ...], axes: Sequence[str], *, sharding: NamedSharding, path: str
) -> None:
    if len(shape) != len(axes):
        raise ValueError(f"{path} has shape {tuple(shape)} and {len(axes)} axes {tuple(axes)}")
    for size, logical, entry in zip(shape, axes, sharding.spec, strict=False):
        over = (entry,) if isinstance(entry, str) else entry or ()
        count = 1
        for axis in over:
            count *= sharding.mesh.shape[axis]
        if size % count:
            sizes = " x ".join(f"{axis}={sharding.mesh.shape[axis]}" for axis in over)
            raise ValueError(
                f"{path} of shape {tuple(shape)}: {logical!r} has size {size}, which does not "
                f"divide over {count} devices ({sizes}); change the size, the mesh or the rule"
            )


def _is_declared(x: Any) -> bool:
    return hasattr(x, "axes") and hasattr(x, "shape")


def _parts(path: tuple[Any, ...]) -> list[str]:
    return [jax.tree_util.keystr((key,), simple=True) for key in path]
