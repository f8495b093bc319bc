"""CUDA graphs captured one after the other, without what `torch.cuda.graph` does around each.

That one gives the allocator's free memory back to the driver before every capture, and the next run
asks for it again: with seventy graphs, seconds. Here it is given back once, by `quietly`, while no
garbage is collected either: a full collection goes through torch's modules again and again, and
nothing that a capture makes is garbage.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from tailrace.engine.garbage import collecting_nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")


@contextmanager
def quietly() -> Iterator[None]:
    """Free what is unused, once; then collect no garbage until the end."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    with collecting_nothing():
        yield


def captured(run: Callable[[], T], stream: torch.cuda.Stream, pool: Any) -> tuple[Any, T]:
    """Return the graph of the kernels that `run` queues, and what it returned.

    Args:
        run: Has run before, so that it neither compiles nor loads kernels.
        stream: Of captures; the same for all that share a pool.
        pool: Of `torch.cuda.graph_pool_handle`: where the graph's tensors lie.

    Raises:
        RuntimeError: The device has no memory, or `run` did what cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool)
        try:
            result = run()
        finally:
            graph.capture_end()
    return graph, result
