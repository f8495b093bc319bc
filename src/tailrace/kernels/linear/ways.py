"""Which of several ways computes a layer, for each class of rows: a table's, or a plan's.

    rows    ..16     ..32     ..64     more
    way     tiles    tiles    tiles    torch        each one of the class's options

All options of a class compute the same; they differ in speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

T_co = TypeVar("T_co", covariant=True)

MANY = 1 << 30
"""The class of all numbers of rows beyond the others."""


def class_words(most_rows: int) -> str:
    """Return what a plan calls a class."""
    return "more rows" if most_rows == MANY else f"up to {most_rows} rows"


class Ways(Generic[T_co]):
    """The ways that serve one layer.

    Args:
        options: By the most rows of a class, ascending: the ways by their names; the first one
            serves until another is told to.
        many_rows: How many rows are timed for the class `MANY`.
        is_exact: Whether all ways of a class give the same bits.
        compiles_long: Whether some take seconds to compile, so that they are asked about last.
    """

    def __init__(
        self,
        options: Mapping[int, Mapping[str, T_co]],
        many_rows: int = 0,
        *,
        is_exact: bool = False,
        compiles_long: bool = False,
    ) -> None:
        self.is_exact, self.compiles_long = is_exact, compiles_long
        self._options = options
        self._many_rows = many_rows
        self._serving = {most_rows: next(iter(ways)) for most_rows, ways in options.items()}

    @property
    def classes(self) -> list[int]:
        """The most rows of each class."""
        return list(self._options)

    def options(self, most_rows: int) -> list[str]:
        """Return the names of what can serve a class."""
        return list(self._options[most_rows])

    def serving(self, most_rows: int) -> str:
        """Return the name of what serves a class."""
        return self._serving[most_rows]

    def serve(self, most_rows: int, name: str) -> None:
        """Let another of the options serve a class.

        Raises:
            KeyError: It is none of them.
        """
        if name not in self._options[most_rows]:
            raise KeyError(name)
        self._serving[most_rows] = name

    def timed_rows(self, most_rows: int) -> int:
        """Return how many rows a class is timed with."""
        return self._many_rows if most_rows == MANY else most_rows

    def of(self, rows: int) -> T_co:
        """Return the way of so many rows, which some class must hold."""
        most_rows = next(bound for bound in self._options if rows <= bound)
        return self._options[most_rows][self._serving[most_rows]]


class RoundedRows(Protocol):
    """Rows in another format."""

    def dequantize(self) -> Tensor:
        """Return float32 [T, I]."""
        ...


class PlannedLinear(Protocol):
    """A layer that a plan chooses ways for."""

    bias_O: Tensor | None  # noqa: N815 - a shape's suffix, as everywhere
    """In the activations' dtype."""

    @property
    def operation(self) -> str:
        """What it computes and over which weight, such as "int4/128 linear"."""
        ...

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs."""
        ...

    @property
    def planned(self) -> tuple[Ways[object], ...]:
        """The ways that it takes; no class is in two of them."""
        ...

    def weight_rows(self, first: int, end: int) -> Tensor:
        """Return the weight of some outputs, float32 [end - first, I], of what is stored.

        Args:
            first: A multiple of 128.
            end: Likewise, or all outputs.
        """
        ...

    def given(self, x_TI: Tensor) -> Tensor | RoundedRows:
        """Return what of these rows is multiplied: themselves, or how they are rounded."""
        ...

    def __call__(self, x_TI: Any) -> Tensor:
        """Return [T, O] for what is `given`."""
        ...


def words_of(layer: PlannedLinear) -> str:
    """Return what a plan calls a layer; those of the same sizes and kind share it."""
    outputs, inputs = layer.sizes
    return f"{layer.operation} {inputs} to {outputs}"
