"""Which bytes are asked for in which gap of a decode step: the schedule, and who is next in it.

A gap is a kernel between two products: it leaves memory mostly idle, and the product after it is
bound by its weight's bytes. A layer has five:

    kernel     norm         | rope     | attention             | norm             | silu
    product            qkv                                     o        gate, up          down
    asks for   qkv's head   | (o's     | o's head, then        | gate_up, where   | down's
                            |   head)  |   gate_up's           |   that ended     |   head

Rules, which `schedule` keeps:
1. No gap asks for more than the budget, and no byte is asked for twice.
2. What is asked for and not multiplied yet never exceeds the room: half of the second-level cache,
   for the other half of it holds what the kernels themselves stream by.
3. A weight is asked for in the order in which its product reads it (`Budget.by_columns`).
4. Where many sequences' KV streams by, what was asked for before attention may be gone after it:
   rope asks only where it is told to (`Budget.is_early`), and attention from where that ended.

Kernels take their asks one after the other, as a step runs (`asking`): a kernel that is not the one
whose turn it is, or a step that ends early, is an error, since bytes would be asked for at the
wrong time and nothing else would tell.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from tailrace.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

Gap = Literal["norm", "rope", "attention", "silu"]

LINE = 128
"""Bytes of a cache's line."""
PIECE = 4096
"""Bytes that one instruction asks for, where memory is asked for from one end to the other."""
MIB = 1 << 20
LINEARS = 4
"""Of a layer: qkv, o, gate and up, down."""


@runtime_checkable
class Streamed(Protocol):
    """A linear layer that tells how few rows read its weight."""

    def streamed(self) -> Tensor:
        """Return the weight's memory, uint8 [R, N]: R rows that a product may read side by side."""
        ...


@dataclass(frozen=True)
class Budget:
    """How much is asked for ahead, and how."""

    nbytes: int
    """The most in one gap."""
    by_columns: bool = False
    """Whether the head of a weight is the beginning of each of its rows, not its first rows.

    Products whose programs all start at once read the former, those of several waves the latter.
    """
    is_early: bool = False
    """Whether o is asked for before attention already."""
    is_kept: bool = False
    """Whether lines that were asked for outlive what streams by: a hint to the cache."""

    @property
    def words(self) -> str:
        """Its name in a plan."""
        flags = {"columns": self.by_columns, "early": self.is_early, "kept": self.is_kept}
        return ", ".join(
            [f"{self.nbytes / MIB:g} MiB", *(name for name, on in flags.items() if on)]
        )


@dataclass(frozen=True)
class Span:
    """Pieces of memory at equal distances."""

    memory: Tensor
    """uint8 [...], one after the other, from the first piece's first byte."""
    stride: int
    """Bytes from one piece to the next."""
    piece: int
    """Bytes of a piece, a multiple of `LINE`."""
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes that are asked for."""
        return self.piece * self.count


@dataclass(frozen=True)
class Ask:
    """What a gap asks for: of a weight, and perhaps of the one after it."""

    gap: Gap
    spans: tuple[Span, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of all spans."""
        return sum(span.nbytes for span in self.spans)


class _Head:
    """A weight, and how far it has been asked for."""

    def __init__(self, streamed_RN: Tensor, budget: Budget) -> None:
        self._rows, self._width = streamed_RN.shape
        flat = streamed_RN.reshape(-1)  # contiguous, so this is the same memory
        # Lines are asked for whole: a weight that begins within one loses what is left of it.
        self._begin = -flat.data_ptr() % LINE
        self._flat = flat
        are_lines = self._begin == 0 and self._width % LINE == 0  # in every row
        self._by_columns = budget.by_columns and self._rows > 1 and are_lines
        self._asked = 0
        """Bytes, or columns."""

    def take(self, room: int) -> tuple[Span, ...]:
        """Return the next bytes, at most so many; none where there is nothing left or no room."""
        if self._by_columns:
            return self._columns(room)
        left = len(self._flat) - self._begin - self._asked
        count = min(room, left) // PIECE
        if count <= 0:
            return ()
        memory = self._flat[self._begin + self._asked :]
        self._asked += count * PIECE
        return (Span(memory, PIECE, PIECE, count),)

    def _columns(self, room: int) -> tuple[Span, ...]:
        width = min(room // self._rows // LINE * LINE, self._width - self._asked)
        if width <= 0:
            return ()
        memory = self._flat[self._asked :]
        self._asked += width
        return (Span(memory, self._width, width, self._rows),)


def schedule(weights: Sequence[Tensor], budget: Budget, room: int) -> list[Ask]:
    """Return the asks of a decode step, in the order of its kernels.

    Args:
        weights: As `Streamed` gives them: qkv, o, gate and up, down of each layer in turn.
        budget: Of a gap.
        room: Bytes that may be ahead at once.

    Raises:
        EngineError: They are no whole layers.
    """
    if len(weights) % LINEARS:
        raise EngineError(f"{len(weights)} linear layers are no whole layers of {LINEARS}")
    asks: list[Ask] = []
    most = min(budget.nbytes, room)
    for first in range(0, len(weights), LINEARS):
        qkv, out, gate_up, down = (
            _Head(weight, budget) for weight in weights[first : first + LINEARS]
        )
        asks.append(Ask("norm", qkv.take(most)))
        early = Ask("rope", out.take(most) if budget.is_early else ())
        rest = out.take(min(most, room - early.nbytes))
        taken = early.nbytes + _size(rest)
        ahead = gate_up.take(min(most - _size(rest), room - taken))
        asks += (early, Ask("attention", (*rest, *ahead)))
        asks.append(Ask("norm", gate_up.take(min(most, room - _size(ahead)))))
        asks.append(Ask("silu", down.take(most)))
    return [*asks, Ask("norm")]  # the model's last, before the head


def _size(spans: tuple[Span, ...]) -> int:
    return sum(span.nbytes for span in spans)


@dataclass(frozen=True)
class Launch:
    """What a kernel is launched with, besides its arguments, to host an ask."""

    spans: tuple[Span, ...] = ()
    hosts: int = 0
    """Programs that ask."""
    is_bulk: bool = False
    """How: see weight_prefetch/triton.py."""
    is_kept: bool = False

    def programs(self, plane: int = 1) -> int:
        """Return by how much the last axis of a grid grows, whose others span `plane` programs."""
        return -(-self.hosts // plane)

    def arguments(self, plane: int = 1) -> dict[str, Any]:
        """Return the kernel's further arguments; where nothing is asked for, none."""
        if not self.spans:
            return {}
        none = Span(self.spans[0].memory, 0, LINE, 0)
        first, second, *_ = (*self.spans, none)
        return {
            "ahead_first": first.memory,
            "first_stride": first.stride,
            "first_piece": first.piece,
            "first_count": first.count,
            "ahead_second": second.memory,
            "second_stride": second.stride,
            "second_piece": second.piece,
            "second_count": second.count,
            "AHEAD": self.programs(plane) * plane,
            "BULK": self.is_bulk,
            "KEPT": self.is_kept,
        }


NOTHING = Launch()


class _Asks:
    """A step's asks, and whose turn it is."""

    def __init__(self, asks: Sequence[Ask], usual: Launch) -> None:
        self._asks, self._usual = asks, usual
        self._next = 0

    def take(self, gap: Gap) -> Launch:
        if self._next == len(self._asks) or self._asks[self._next].gap != gap:
            raise EngineError(
                f"weights asked for ahead: {gap} comes where {self.left or 'the end'} was expected"
            )
        ask = self._asks[self._next]
        self._next += 1
        return replace(self._usual, spans=ask.spans) if ask.spans else NOTHING

    @property
    def left(self) -> str:
        """The next few gaps, in words."""
        return ", ".join(ask.gap for ask in self._asks[self._next : self._next + 3])


_asks: ContextVar[_Asks | None] = ContextVar("weights asked for ahead", default=None)


@contextmanager
def asking(
    asks: Sequence[Ask], *, hosts: int, is_bulk: bool, is_kept: bool = False
) -> Iterator[None]:
    """Have this thread's kernels of one decode step ask, within the block.

    Args:
        asks: From `schedule`.
        hosts: Programs that ask, in each gap: one for each multiprocessor.
        is_bulk: Whether the GPU takes pieces, not lines (`asks_in_bulk`).
        is_kept: Of the budget.

    Raises:
        EngineError: The step's kernels are not those of the asks.
    """
    step = _Asks(asks, Launch(hosts=hosts, is_bulk=is_bulk, is_kept=is_kept))
    token = _asks.set(step)
    try:
        yield
    finally:
        _asks.reset(token)
    if step.left:
        raise EngineError(f"weights asked for ahead: the step ended before {step.left}")


def asked_ahead(gap: Gap) -> Launch:
    """Return what the kernel that is about to be launched asks for."""
    step = _asks.get()
    return NOTHING if step is None else step.take(gap)


def asks_in_bulk(capability: tuple[int, int]) -> bool:
    """Tell whether a GPU of that compute capability takes pieces of memory, not lines alone."""
    return capability >= (9, 0)
