"""Which specialisation of the attention kernels serves what, for each kind of GPU.

Hopper's rows at 128 dimensions are measured (benchmarks/gpu_attention.py, on an H200). The others
are shapes of the same kernels that compile without a spill and fit the shared memory:
tests/kernels/test_compile_ahead.py compiles every row, for blocks of 16 tokens, and holds it to
that. (With blocks of 32, Ampere's tile of 128 x 64 at 128 dimensions spills 120 bytes.)
"""

from __future__ import annotations

from tailrace.errors import ConfigError
from tailrace.kernels.paged_attention.triton_decode import DecodeShape
from tailrace.kernels.paged_attention.triton_prefill import Shape

Capability = tuple[int, int]
"""Of a GPU, as `torch.cuda.get_device_capability` gives it: (9, 0) is Hopper's."""

FLOAT8_CAPABILITY: Capability = (8, 9)
"""The least that converts e4m3 in hardware, without which Triton does not compile it."""

INTERPRETER: Capability = (9, 0)
"""What Triton's interpreter stands in for."""

AMPERE, ADA, HOPPER = 80, 89, 90

PREFILL: dict[int, dict[int, tuple[tuple[int, Shape], ...]]] = {
    AMPERE: {
        64: ((1024, Shape(64, 64, 4, 3)), (1 << 30, Shape(128, 64, 8, 3))),
        128: ((1 << 30, Shape(128, 64, 8, 3)),),
        256: ((1 << 30, Shape(64, 32, 8, 2)),),
    },
    ADA: {
        64: ((1024, Shape(64, 64, 4, 3)), (1 << 30, Shape(128, 64, 8, 3))),
        128: ((1 << 30, Shape(128, 32, 8, 3)),),
        256: ((1 << 30, Shape(64, 32, 8, 2)),),
    },
    HOPPER: {
        64: ((1 << 30, Shape(64, 64, 4, 3)),),
        128: ((1 << 30, Shape(64, 64, 4, 3)),),
        256: ((1 << 30, Shape(64, 32, 8, 2)),),
    },
}
"""By kind of GPU and head dimension: (below so many keys, shape), ascending."""

CLASSES = (1024, 3072)
"""Where the classes end that a plan chooses shapes for, in keys of the longest sequence."""

BOUNDS = (*CLASSES, 1 << 30)
"""With the end of the last class, which no sequence reaches."""

# On an H200 all of those at 128 dimensions were compared with the truth (gpu_attention.py).
CANDIDATES: dict[int, dict[int, tuple[Shape, ...]]] = {
    HOPPER: {
        64: (Shape(128, 64, 8, 3),),
        128: (
            Shape(128, 64, 8, 3),
            Shape(128, 64, 8, 2),
            Shape(128, 128, 8, 2),
        ),
    },
}
"""What a plan may choose beside `PREFILL`'s rows, by kind of GPU and head dimension."""

# The split is the same everywhere: where a row's sums are cut decides its last bits.
DECODE: dict[int, dict[int, DecodeShape]] = {
    AMPERE: {
        64: DecodeShape(512, 128, 4, 3),
        128: DecodeShape(512, 128, 4, 3),
        256: DecodeShape(512, 64, 8, 2),
    },
    # 99 KiB of shared memory: tiles half as wide let two programs share a multiprocessor.
    ADA: {
        64: DecodeShape(512, 128, 4, 3),
        128: DecodeShape(512, 64, 4, 3),
        256: DecodeShape(512, 32, 4, 2),
    },
    HOPPER: {
        64: DecodeShape(512, 128, 4, 3),
        128: DecodeShape(512, 128, 4, 3),
        256: DecodeShape(512, 64, 8, 2),
    },
}


DECODE_CANDIDATES: dict[int, dict[int, tuple[DecodeShape, ...]]] = {
    HOPPER: {
        64: (DecodeShape(512, 128, 4, 2), DecodeShape(512, 128, 8, 3)),
        128: (DecodeShape(512, 128, 4, 2), DecodeShape(512, 128, 8, 3)),
    },
}
"""What a plan may choose beside `DECODE`'s rows: the same tiles, so that sums are cut alike; one
whose bits differ all the same is refused when it is measured."""

# Keys are loaded behind the table that leads to them, so of 5 stages two are tiles in flight, and
# of 3 one. A tile of float8 is half as many bytes: two of them are what one of 16 bits was.
FLOAT8_DECODE: dict[int, dict[int, DecodeShape]] = {HOPPER: {128: DecodeShape(512, 128, 4, 5)}}
"""What serves over a float8 cache instead of `DECODE`'s rows."""

FLOAT8_DECODE_CANDIDATES: dict[int, dict[int, tuple[DecodeShape, ...]]] = {
    HOPPER: {
        64: (DecodeShape(512, 128, 4, 5),),
        128: (DecodeShape(512, 128, 8, 5),),
        256: (DecodeShape(512, 64, 8, 3), DecodeShape(512, 64, 8, 5)),
    },
}
"""What a plan may choose over a float8 cache beside those; timed at 128 dimensions alone."""


def kind(capability: Capability) -> int:
    """Return whose rows serve a GPU: `AMPERE`, `ADA` or `HOPPER`.

    Raises:
        ConfigError: The GPU is older than Ampere.
    """
    major, minor = capability
    if major < 8:
        raise ConfigError(
            f"this GPU's compute capability is {major}.{minor}: the kernels need 8.0 or later "
            "(Ampere); use another GPU, or the CPU"
        )
    if major == 8:
        return AMPERE if minor == 0 else ADA
    # Consumer Blackwell has Ada's shared memory.
    return ADA if major == 12 else HOPPER


def prefill_shape(head_dim: int, max_kv_len: int, capability: Capability) -> Shape:
    """Return the shape for a step whose longest sequence has `max_kv_len` keys.

    Raises:
        ConfigError: No kernel serves the head dimension or the GPU.
    """
    rows = PREFILL[kind(capability)][_row(head_dim)]
    return next(shape for bound, shape in rows if max_kv_len < bound)


def prefill_candidates(head_dim: int, capability: Capability) -> tuple[Shape, ...]:
    """Return the shapes that a plan may choose from, `PREFILL`'s own first.

    Raises:
        ConfigError: No kernel serves the head dimension or the GPU.
    """
    gpu, row = kind(capability), _row(head_dim)
    own = (shape for _, shape in PREFILL[gpu][row])
    more = CANDIDATES.get(gpu, {}).get(row, ())
    return tuple(dict.fromkeys((*own, *more)))


def decode_shape(head_dim: int, capability: Capability, *, is_float8: bool = False) -> DecodeShape:
    """Return the shape of the decode kernel.

    Args:
        head_dim: Of the model.
        capability: Of the GPU.
        is_float8: Whether the cache is.

    Raises:
        ConfigError: No kernel serves the head dimension or the GPU.
    """
    gpu, row = kind(capability), _row(head_dim)
    deeper = FLOAT8_DECODE.get(gpu, {}) if is_float8 else {}
    return deeper.get(row, DECODE[gpu][row])


def decode_candidates(
    head_dim: int, capability: Capability, *, is_float8: bool = False
) -> tuple[DecodeShape, ...]:
    """Return the shapes that a plan may choose from, what serves without one first.

    Args:
        head_dim: Of the model.
        capability: Of the GPU.
        is_float8: Whether the cache is.

    Raises:
        ConfigError: No kernel serves the head dimension or the GPU.
    """
    gpu, row = kind(capability), _row(head_dim)
    more = DECODE_CANDIDATES.get(gpu, {}).get(row, ())
    deeper = FLOAT8_DECODE_CANDIDATES.get(gpu, {}).get(row, ()) if is_float8 else ()
    usual = decode_shape(head_dim, capability, is_float8=is_float8)
    return tuple(dict.fromkeys((usual, DECODE[gpu][row], *more, *deeper)))


def key_words(bound: int) -> str:
    """Return what a plan and the log call the class of sequences with fewer keys than the bound."""
    return "longer" if bound == BOUNDS[-1] else f"below {bound} keys"


def _row(head_dim: int) -> int:
    """Return the head dimension whose rows serve another one: small ones take that of 64."""
    if head_dim in (16, 32):
        return 64
    if head_dim in (64, 128, 256):
        return head_dim
    raise ConfigError(f"head_dim {head_dim}: the GPU kernels serve 16, 32, 64, 128 and 256")
