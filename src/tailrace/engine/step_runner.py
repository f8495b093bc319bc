"""What the engine needs of a runner, and a step that a runner has been given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tailrace.engine.block_manager import BlockManager
    from tailrace.engine.runner import StepResult
    from tailrace.engine.scheduler import Step
    from tailrace.engine.sequence import Sequence
    from tailrace.engine.step_time import StepLoad


class Executed(Protocol):
    """A step that ran, or will have."""

    @property
    def is_done(self) -> bool:
        """Whether it has."""
        ...

    def wait(self) -> StepResult:
        """Return what it brought, once it has."""
        ...


class StepRunner(Protocol):
    """What the engine needs of a runner."""

    def padded_decodes(self, decodes: int) -> int:
        """Return the rows that a step with prompts computes for so many decodes."""
        ...

    def prepare(self, step: Step, blocks: BlockManager) -> Any:
        """Turn a step into the runner's input, without waiting for a result."""
        ...

    def whole_prompts(self, decodes: int, tokens: int) -> int:
        """Return the most prompt tokens, up to those given, that need no padding beside decodes."""
        ...

    def computed(self, step: Step) -> StepLoad:
        """Return what a step computes, its padding included."""
        ...

    def touch_kv(self, units: list[int]) -> None:
        """Make the memory of these units of KV real; on the runner's thread."""
        ...

    def describe(self, prepared: Any) -> dict[str, object]:
        """Say what a step is and what serves it, for the log, without waiting for anything."""
        ...

    def check_device(self) -> None:
        """Raise where no further step can succeed in this process."""
        ...

    def execute(self, prepared: Any) -> Executed:
        """Run the step, or queue it on the device."""
        ...


@dataclass
class InFlight:
    """A step that was issued and not yet collected."""

    step: Step
    result: Future[Executed]
    issued_s: float
    load: StepLoad
    predicted_s: float | None
    host_s: float
    """What choosing and preparing it took."""
    follows: bool
    """Whether it was issued while another was in flight."""
    void: set[Sequence] = field(default_factory=set)
    """Whose chunks continue a step that brought nothing, so that these bring nothing either."""

    @property
    def is_done(self) -> bool:
        """Whether waiting for it would take no time."""
        return is_done(self.result)


def is_done(result: Future[Executed]) -> bool:
    """Return whether waiting for a step would take no time; does not wait.

    Raises:
        RuntimeError: The device is lost.
    """
    if not result.done():
        return False
    return result.exception() is not None or result.result().is_done
