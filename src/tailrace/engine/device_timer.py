"""How long a call takes on a GPU, whatever it takes the host to launch it.

Kernels that serve are captured in graphs, so what the host takes to launch one, which may be ten
times what it takes to run, is not theirs. A call is timed behind writes that keep the device busy,
and counts only where the device had not come to it when all of it was queued:

    host      writes, begin, the call, end      queued
    device    writes ...........................:.......  begin  the call  end
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailrace.kernels.plan_answers import Timer

_CALLS = 9
_COLD_BYTES = 256 << 20
"""Written before a call, which finds a cold L2 cache then: 65 us on an H200."""
_LEAST_WRITES, _MOST_WRITES = 2, 128
"""Before a call. What takes the host longer to queue than the most take is timed all the same."""


def device_timer(device: torch.device) -> Timer:
    """Return what returns the seconds of one call on a GPU: the median of a few, after one."""
    written = torch.empty(_COLD_BYTES, dtype=torch.uint8, device=device)
    event = partial(torch.cuda.Event, enable_timing=True)
    return partial(seconds, write=written.zero_, event=event)


def seconds(
    work: Callable[[], object],
    *,
    write: Callable[[], object],
    event: Callable[[], torch.cuda.Event],
) -> float:
    """Return the median seconds that the device takes for a call.

    Args:
        work: Queues the call.
        write: Queues what keeps the device busy for a while, and leaves nothing of the call's in
            its cache.
        event: Makes an event that tells times.
    """
    work()
    times: list[float] = []
    writes = _LEAST_WRITES
    while len(times) < _CALLS:
        begin, end = event(), event()
        for _ in range(writes):
            write()
        begin.record()
        work()
        end.record()
        has_come = begin.query()  # type: ignore[no-untyped-call]  # torch's own gap
        end.synchronize()
        if has_come and writes < _MOST_WRITES:
            writes *= 2
        else:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
