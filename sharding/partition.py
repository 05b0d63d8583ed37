"""Logical axes -> shardings, checked: an array is sharded as the rules say or raises."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import tree_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.sharding.rules import MeshAxes, Rules, instead_of_length


@dataclasses.dataclass(frozen=True)
class Layout:
    """The placement of arrays on a mesh. Hashable, so that compiled functions can close over it.

    `sharding`, `tree` and `state` use the rules for parameters; the others use those for
    activations.

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

    def sharding(self, axes: Sequence[str]) -> NamedSharding:
        """Returns the sharding of a parameter with these logical axes, without mesh axes of size 1.

        Raises:
          ValueError: if a logical axis has no rule, or two dimensions are cut over one mesh axis.
        """
        return _sharding(self.mesh, axes, rules=dict(self.rules.parameters))

    def batch(self, axes: Sequence[str]) -> NamedSharding:
        """Returns the sharding of an input or an activation; raises as `sharding`."""
        return _sharding(self.mesh, axes, rules=dict(self.rules.activations))

    @property
    def replicated(self) -> NamedSharding:
        """The whole array on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def axes(self, logical: str) -> MeshAxes:
        """Returns the mesh axes, larger than 1, that a logical axis of activations is cut over."""
        return _mesh_axes((*self.batch((logical,)).spec, None)[0])

    def count(self, logical: str) -> int:
        """Returns the number of parts that a logical axis of activations is cut into."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes(logical))

    @property
    def divided(self) -> tuple[str, MeshAxes] | None:
        """A logical axis of activations inside products that is cut, with its mesh axes; None if
        only rows and their tokens are (`rules.by_rows`)."""
        inner = (k for k, _ in self.rules.activations if k not in ("batch", "routed", "length"))
        return next(((k, self.axes(k)) for k in inner if self.axes(k)), None)

    def whole_rows(self, *axes: str) -> "Layout":
        """Returns the layout of activations that are cut along these logical axes instead of along
        the tokens of a row."""
        return Layout(self.mesh, instead_of_length(self.rules, axes=axes))

    def constrain(self, x: jax.Array, axes: Sequence[str]) -> jax.Array:
        """Constrains the sharding of an activation inside a compiled function; free on one device.

        Raises:
          ValueError: as `sharding`, and if a dimension does not divide.
        """
        sharding = self.batch(axes)
        _check(x.shape, axes, sharding=sharding, name="activation")
        return x if self.mesh.size == 1 else jax.lax.with_sharding_constraint(x, sharding)

    def gather(self, weight: jax.Array, axes: Sequence[str]) -> jax.Array:
        """Gathers a parameter for the products of a layer, inside a compiled function: the result
        is cut only where the rules for activations cut the same logical axis over the same mesh
        axes. Its gradient is reduced to the parameter's own parts at once. Free on one device.

        Without this XLA may cut a product along the dimension that it sums over, which writes a
        partial sum for each device.

        Raises:
          ValueError: as `sharding`.
        """
        cut, whole = self.sharding(axes), self.gathered(axes)
        return weight if cut == whole else _gather(weight, cut, whole)

    def gathered(self, axes: Sequence[str]) -> NamedSharding:
        """Returns the sharding of a parameter that `gather` returns; raises as `sharding`."""
        used = {k: set(v) for k, v in self.rules.activations}
        rules = {
            k: tuple(axis for axis in v if axis in used.get(k, ()))
            for k, v in self.rules.parameters
        }
        return _sharding(self.mesh, axes, rules=rules)

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
          ValueError: as `sharding`; at the call, if a dimension does not divide.
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
          declared: a tree whose leaves have a `shape` and logical `axes`, a name per dimension.

        Raises:
          ValueError: as `sharding`, and if a dimension does not divide; the message names the
            parameter by its path.
        """
        return tree_util.tree_map_with_path(self._declared, declared, is_leaf=_is_declared)

    def constraints(self, declared: Any) -> Any:
        """Returns `tree`, or None on one device, where nothing is constrained."""
        return self.tree(declared) if self.mesh.size > 1 else None

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
        leaves = tree_util.tree_leaves_with_path(declared, is_leaf=_is_declared)
        known = [(_parts(path), leaf.shape, self._declared(path, leaf)) for path, leaf in leaves]
        # The longest path first: "layers/embed" is a better match than "embed".
        known.sort(key=lambda parameter: -len(parameter[0]))

        def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            parts = _parts(path)
            for name, shape, sharding in known:
                if parts[-len(name) :] == name and tuple(leaf.shape) == tuple(shape):
                    return sharding
            return self.replicated

        return tree_util.tree_map_with_path(one, state)

    def _declared(self, path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = f"parameter {'/'.join(_parts(path))!r}"
        try:
            sharding = self.sharding(leaf.axes)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        _check(leaf.shape, leaf.axes, sharding=sharding, name=name)
        return sharding


def _gathered(weight, cut, whole):
    return jax.lax.with_sharding_constraint(weight, whole), None


def _scattered(cut, whole, _, gradient):
    return (jax.lax.with_sharding_constraint(gradient, cut),)


_gather: Any = jax.custom_vjp(lambda *args: _gathered(*args)[0], nondiff_argnums=(1, 2))
_gather.defvjp(_gathered, _scattered)


def _sharding(mesh: Mesh, axes: Sequence[str], *, rules: dict[str, MeshAxes]) -> NamedSharding:
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
    return NamedSharding(mesh, PartitionSpec(*entries))


def _check(
    shape: tuple[int, ...], axes: Sequence[str], *, sharding: NamedSharding, name: str
) -> None:
    if len(shape) != len(axes):
        raise ValueError(f"{name} has shape {tuple(shape)} and {len(axes)} axes {tuple(axes)}")
    for size, logical, entry in zip(shape, axes, sharding.spec, strict=False):
        cuts = {axis: sharding.mesh.shape[axis] for axis in _mesh_axes(entry)}
        if size % (count := math.prod(cuts.values())):
            sizes = " x ".join(f"{axis}={n}" for axis, n in cuts.items())
            raise ValueError(
                f"{name} of shape {tuple(shape)}: {logical!r} has size {size}, which does not "
                f"divide over {count} devices ({sizes}); change the size, the mesh or the rule"
            )


def _mesh_axes(entry: str | MeshAxes | None) -> MeshAxes:
    return (entry,) if isinstance(entry, str) else entry or ()


def _is_declared(x: Any) -> bool:
    return hasattr(x, "axes") and hasattr(x, "shape")


def _parts(path: tuple[Any, ...]) -> list[str]:
    return [tree_util.keystr((key,), simple=True) for key in path]
