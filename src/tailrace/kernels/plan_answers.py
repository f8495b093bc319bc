"""How a plan's questions are answered: candidates are checked, then timed, and the fastest wins.

A candidate may win only where its result is as near to the reference as the default's, or, of
decodes' attention, where it is the same to the last bit; one that raises, strays, or leaves counts
behind for the next to find, is refused, with the reason; one that hangs, or is a fault on the
device, ends the start, for the device serves nobody then. One that finds no memory on the device is
recorded as such, for it may serve where there is more, and a question without memory for its
reference or its default goes unanswered. Time is bounded between candidates, so the last one's
compilation may overrun it; what was not reached keeps its default until it is asked again.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog
import torch

from tailrace.errors import ConfigError
from tailrace.kernels.plan import Choice, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from tailrace.kernels.plan_questions import Question

    Timer = Callable[[Callable[[], object]], float]

log = structlog.get_logger("tailrace.engine")

_STRAY = 2.0
"""A candidate errs at most so many times as much as the default."""
_ROUNDING = 1e-3
"""An error that any of them may have: half precision's own."""
_MOST_S, _POLL_S = 30.0, 1e-4
"""Of a candidate's first run, once it is compiled; and how often it is looked at."""
_MOST_WORDS = 300
"""Of a failure."""
_AGAIN = (
    "start again with --plan off (or --prefill-attention triton, if it is Hopper's), and report it "
    "with the GPU's name and torch's version"
)


def measure(
    questions: Iterable[Question],
    timer: Timer,
    clock: Callable[[], float],
    bound_s: float,
    lacks_memory: Callable[[Exception], bool] = lambda _: False,
) -> list[Choice]:
    """Return choices for the questions that were reached in time and found memory.

    Args:
        questions: Asked in order.
        timer: Returns the seconds of one call of what it is given.
        clock: Monotonic seconds.
        bound_s: No candidate is begun after so many seconds.
        lacks_memory: Tells whether something failed for want of memory on the device.

    Raises:
        ConfigError: A default fails: nothing would serve.
    """
    end_s = clock() + bound_s
    choices = []
    for question in questions:
        if clock() >= end_s:
            break
        try:
            choice = _answer(question, timer, lambda: clock() >= end_s, lacks_memory)
        except Exception as failure:
            if not lacks_memory(failure):
                raise
            words = str(failure.__cause__ or failure).splitlines()[0]
        else:
            if choice is None:
                break
            choices.append(choice)
            continue
        log.warning("plan_question_without_memory", question=question.words, reason=words)
        _give_back()  # the failure is gone, and with it what its frames held
    return choices


def _give_back() -> None:
    """Return to the driver what a failed attempt had allocated."""
    gc.collect()
    torch.cuda.empty_cache()


@dataclass(frozen=True)
class _Failed:
    """A candidate without a time."""

    why: str
    is_memory: bool = False


def _answer(
    question: Question,
    timer: Timer,
    is_over: Callable[[], bool],
    lacks_memory: Callable[[Exception], bool],
) -> Choice | None:
    """Return the choice, or None where time ran out before all candidates were timed."""
    truth = question.reference()
    expected, error = _of_default(question, truth)
    allowed = max(_STRAY * error, _ROUNDING)
    seconds = {question.default: timer(question.candidates[question.default])}
    refused, no_memory = {}, {}

    def fault(found: Tensor) -> str:
        error = _error(found, truth)
        if error > allowed:
            return f"its error is {error:.1e}, more than {allowed:.1e}"
        if question.is_exact and not torch.equal(found, expected):
            return "its bits are not the default's"
        return ""

    for name, work in question.candidates.items():
        if name == question.default:
            continue
        if is_over():
            return None
        tried = _try(f"{question.words}: {name}", work, fault, timer, lacks_memory)
        if question.mend() and not isinstance(tried, _Failed):
            tried = _Failed("it leaves counts behind that the next kernel would add to")
        if not isinstance(tried, _Failed):
            seconds[name] = tried
        elif tried.is_memory:
            no_memory[name] = tried.why
            _give_back()
        else:
            refused[name] = tried.why
            log.info("plan_candidate_refused", question=question.words, name=name, why=tried.why)

    chosen = partial(
        choose,
        question.operation,
        question.sizes,
        question.default,
        seconds,
        refused,
        no_memory=no_memory,
    )
    return _confirmed(question, seconds, timer, chosen)


def _confirmed(
    question: Question, seconds: dict[str, float], timer: Timer, chosen: Callable[[], Choice]
) -> Choice:
    """Return the choice by times that hold a second time: of many, one is the fastest by chance.

    A winner and the default are timed again, and what is kept is the default's shorter time and
    the other's longer one.

    Args:
        question: All of whose candidates were tried.
        seconds: Of those that may serve; changed.
        timer: As of `measure`.
        chosen: Returns the choice by the times as they are.
    """
    confirmed = {question.default}
    while (winner := chosen().winner) not in confirmed:
        for name, kept in ((question.default, min), (winner, max)):
            seconds[name] = kept(seconds[name], timer(question.candidates[name]))
        confirmed.add(winner)
    return chosen()


def _try(
    words: str,
    work: Callable[[], Tensor],
    fault: Callable[[Tensor], str],
    timer: Timer,
    lacks_memory: Callable[[Exception], bool],
) -> float | _Failed:
    """Check a candidate, then time it; return its seconds, or why it has none.

    Raises:
        ConfigError: It does not end, or is a fault on the device: whatever is asked of that next
            would wait for it, or fail as well.
        Exception: What passed the check fails while it is timed, and not for want of memory: the
            device is not to be relied on.
    """
    try:
        found = work()
        has_ended = _ends(found)
        why = fault(found) if has_ended else ""
    # Triton's compiler raises what it likes; a candidate that cannot run here is no fault.
    except Exception as failure:  # noqa: BLE001
        return _failed(words, failure, lacks_memory)
    if not has_ended:
        raise ConfigError(
            f"plan: {words} has not ended after {_MOST_S:.0f} s, and the GPU waits for it: {_AGAIN}"
        )
    if why:
        return _Failed(why)
    try:
        return timer(work)
    except Exception as failure:
        failed = _failed(words, failure, lacks_memory)
        if not failed.is_memory:
            raise
        return failed


def _failed(words: str, failure: Exception, lacks_memory: Callable[[Exception], bool]) -> _Failed:
    """Return what became of a candidate; the device is as good as it was.

    Raises:
        ConfigError: It took the device's context with it: whatever is asked next would fail too,
            and be taken for a fault of its own.
    """
    if lacks_memory(failure):
        return _Failed(_words(failure), is_memory=True)
    if _is_lost():
        raise ConfigError(
            f"plan: {words} is a fault on the GPU ({_words(failure)}): {_AGAIN}"
        ) from failure
    return _Failed(_words(failure))


def _is_lost() -> bool:
    """Whether the device refuses all work; a fault on it shows in whatever is called next."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's own gap
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _ends(found: Tensor) -> bool:
    """Wait for a result, not for ever: a barrier that nobody reaches would hold the device."""
    if not found.is_cuda:
        return True
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own gap
    event.record()
    end_s = time.monotonic() + _MOST_S
    while not event.query():  # type: ignore[no-untyped-call]  # as above
        if time.monotonic() > end_s:
            return False
        time.sleep(_POLL_S)  # an event can be waited for without an end only
    return True


def _words(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"[:_MOST_WORDS]


def _of_default(question: Question, truth: Tensor) -> tuple[Tensor, float]:
    """Return the default's result and its error, which is finite.

    Raises:
        ConfigError: It fails: there is nothing to hold others to, and nothing would serve.
    """
    at = f"plan: {question.operation}, {question.sizes}: the default kernel ({question.default})"
    then = "it cannot serve this model here; report it with the GPU's name and torch's version"
    try:
        found = question.candidates[question.default]()
        error = _error(found, truth)
    except Exception as failure:  # as of candidates; but without this one nothing serves
        raise ConfigError(f"{at} fails ({_words(failure)}): {then}") from failure
    if not error < math.inf:
        raise ConfigError(f"{at} gives numbers that are not finite: {then}")
    return found, error


def _error(found: Tensor, truth: Tensor) -> float:
    """Return |found - truth| / |truth|; infinite where found is not finite."""
    distance = (found.double() - truth.double()).norm()
    error = float(distance / truth.double().norm()) if distance != 0.0 else 0.0
    return error if error == error else float("inf")  # noqa: PLR0124 - NaN is not itself
