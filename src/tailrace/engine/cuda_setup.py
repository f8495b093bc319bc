"""From settings to a runner on one GPU: weights, the memory left for KV, graphs."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import structlog
import torch

from tailrace.engine.accuracy_record import Known, Numerics, known
from tailrace.engine.cuda_plan import measure_whole, settle
from tailrace.engine.cuda_runner import CudaRunner
from tailrace.engine.decode_launches import describe as describe_launches
from tailrace.engine.device_faults import is_out_of_memory
from tailrace.engine.device_kv import allocate_kv, kv_bytes_per_token
from tailrace.engine.device_sampler import DeviceSampler
from tailrace.engine.device_timer import device_timer
from tailrace.engine.frames import Detail, Frame, graph_buckets, mixed_frames
from tailrace.engine.host_kv import STAGING_BYTES
from tailrace.engine.kv_calibration import find_scales
from tailrace.engine.phase_overlap import overlap_of, why_off
from tailrace.engine.prefill_weights import choose
from tailrace.engine.prefill_weights import make as make_copy
from tailrace.engine.setup import describe_kv
from tailrace.engine.slot_tables import most_sequences, table_bytes
from tailrace.engine.start_times import StartTimes
from tailrace.errors import ConfigError
from tailrace.kernels.attention_shapes import FLOAT8_CAPABILITY
from tailrace.kernels.early_compile import EarlyCompile
from tailrace.kernels.linear.float8 import FLOAT8
from tailrace.kernels.linear.float8_linear import ROUNDED
from tailrace.kernels.paged_attention.device_batch import DeviceBatch, cut_tiles
from tailrace.kernels.paged_attention.prefill_kernels import describe
from tailrace.kernels.paged_attention.triton_widened_kv import WidenedKv
from tailrace.kernels.triton_kernels import TritonKernels
from tailrace.models.loader import describe_weights, load_model

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tailrace.config import EngineConfig
    from tailrace.engine.prefill_weights import Prefill
    from tailrace.kernels.plan import Plan
    from tailrace.models.causal_lm import CausalLM

T = TypeVar("T")

log = structlog.get_logger("tailrace.engine")

_GRAPH_BYTES = 512 << 20
"""Kept free for the graphs themselves and cuBLAS's workspaces."""


@dataclass(frozen=True)
class MemoryPlan:
    """What this process may take of the device's memory, in bytes."""

    total: int
    allowed: int
    """total x --gpu-memory-utilization."""
    weights: int
    activations: int
    """The peak of the largest step, measured."""
    overhead: int
    """CUDA's context, graphs with the activations and logits they keep, attention's scratch,
    block tables."""
    kv: int
    prompt_weights: int = 0
    """Of `weights`, the copy that serves prompts."""

    def describe(self) -> str:
        """Say it in one line."""
        parts = (
            ("weights", self.weights),
            ("largest step", self.activations),
            ("context and graphs", self.overhead),
            ("KV", self.kv),
        )
        shown = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts)
        if self.prompt_weights:
            shown += f" (of the weights, the prompts' copy {self.prompt_weights / 2**30:.2f})"
        return (
            f"--gpu-memory-utilization allows {self.allowed / 2**30:.2f} of "
            f"{self.total / 2**30:.2f} GiB: {shown}"
        )


def load_device(index: int) -> torch.device:
    """Take a GPU for this thread.

    Raises:
        ConfigError: There is no such GPU, or torch cannot use it.
    """
    if not torch.cuda.is_available():
        built = torch.version.cuda or "no CUDA at all"
        raise ConfigError(
            f"--gpus {index}: torch {torch.__version__} (built for {built}) finds no GPU here; "
            "leave --gpus out to serve on the CPU"
        )
    if not 0 <= index < torch.cuda.device_count():
        raise ConfigError(f"--gpus {index}: this machine has {torch.cuda.device_count()}")
    capability = torch.cuda.get_device_capability(index)
    if capability < (8, 0):
        raise ConfigError(
            f"--gpus {index}: {torch.cuda.get_device_name(index)} has compute capability "
            f"{capability[0]}.{capability[1]}; the kernels need 8.0 or above"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def load_weights(
    config: EngineConfig, folder: Path, times: StartTimes | None = None
) -> tuple[TritonKernels, CausalLM]:
    """Take the GPU and load the model onto it.

    Raises:
        ConfigError: The device is missing.
        ModelError: The checkpoint cannot be served.
    """
    times = times or StartTimes()
    device = load_device(config.gpus[0])
    torch.cuda.synchronize(device)  # makes CUDA's context, for whose seconds weights cannot help
    times.mark("device")
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    kernels = kernels_as_asked(config, device, dtype)
    model = load_model(
        folder,
        dtype=dtype,
        kernels=kernels,
        load_format=config.load_format,
        quant_type=config.quant_type,
        seed=config.seed,
    )
    check_fp8_activations(config, model)
    torch.cuda.synchronize(device)
    times.mark("weights")
    return kernels, model


def kernels_as_asked(config: EngineConfig, device: torch.device, dtype: str) -> TritonKernels:
    """Return the kernels for activations of a dtype, bfloat16 or float16."""
    return TritonKernels(
        device,
        dtype,  # type: ignore[arg-type]  # checked by the config
        rounds_all=config.fp8_activations == "all",
        hopper_decodes=config.may_decode_by_hopper,
    )


def check_fp8_activations(config: EngineConfig, model: CausalLM) -> None:
    """See that some layer rounds every step's activations, where that is asked for.

    Raises:
        ConfigError: None does.
    """
    if config.fp8_activations == "all" and not any(
        name.endswith(ROUNDED) for name in model.linear_names
    ):
        held = ", ".join(model.linear_names)
        raise ConfigError(
            f"--fp8-activations all: no layer multiplies in FP8 (they are by {held}); it needs FP8 "
            "weights (--quant-type fp8 makes them of plain ones, and of those in 4 bits) and a GPU "
            "of compute capability 8.9 or above; leave it out"
        )


def attend_as_asked(
    config: EngineConfig, kernels: TritonKernels, model: CausalLM, kv_dtype: torch.dtype
) -> None:
    """Let the kernels that are asked for compute attention over a cache.

    Raises:
        ConfigError: --prefill-attention or --decode-kernels asks for one that cannot; it says why.
    """
    heads, unit = model.config, config.kv_unit_tokens
    kernels.serve_prompts_by(
        config.prefill_attention, head_dim=heads.head_dim, kv_dtype=kv_dtype, unit=unit
    )
    if config.decode_kernels != "hopper":
        return
    group = heads.num_heads // heads.num_kv_heads
    reason = kernels.why_no_hopper_decodes(heads.head_dim, kv_dtype, unit, group)
    if reason is not None:
        raise ConfigError(f"--decode-kernels hopper: {reason}; use auto or triton")


def measure_plan(config: EngineConfig, folder: Path, out: Path | None) -> tuple[Plan, Path]:
    """Measure a model's whole plan on its GPU and write it; without `out` to where auto looks.

    Raises:
        ConfigError: The device is missing, there is nothing to choose, or the plan there is pinned.
        ModelError: The checkpoint cannot be served.
    """
    kernels, model = load_weights(config, folder)
    attend_as_asked(config, kernels, model, kernels.dtype)
    prefill = copy_for_prompts(config, folder, kernels, model)
    longest = config.context_length or model.config.max_position
    timer = device_timer(kernels.device)
    return measure_whole(kernels, prefill.model, longest, out, timer, unit=config.kv_unit_tokens)


def load_runner(
    config: EngineConfig,
    folder: Path,
    token_budget: int,
    times: StartTimes | None = None,
    *,
    compiler: subprocess.Popen[bytes] | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> tuple[CudaRunner, int, int, str]:
    """Load the model, size the KV pool, capture graphs; runs on the runner's thread.

    Args:
        config: The settings.
        folder: Of the checkpoint.
        token_budget: Most rows of a step.
        times: Where the phases are marked.
        compiler: A process for kernels that has been begun (compile_process.py); ends with this.
        meanwhile: Begins what may go on while other processes compile, if any do.

    Returns:
        The runner, the context length in tokens, the pool's blocks, and the device in words.

    Raises:
        ConfigError: The device is missing, or its memory does not hold what was asked for.
        ModelError: The checkpoint cannot be served.
    """
    times = times or StartTimes()
    with EarlyCompile(begun=compiler, mark=times.mark, meanwhile=meanwhile) as early:
        if torch.cuda.is_available():
            early.expect()
        kernels, loaded = load_weights(config, folder, times)
        is_compiled = kernels.device.type == "cuda"  # else interpreted, in tests
        return _load_runner(
            config,
            folder,
            kernels,
            loaded,
            token_budget=token_budget,
            times=times,
            early=early if is_compiled else None,
        )


def _load_runner(
    config: EngineConfig,
    folder: Path,
    kernels: TritonKernels,
    loaded: CausalLM,
    *,
    token_budget: int,
    times: StartTimes,
    early: EarlyCompile | None,
) -> tuple[CudaRunner, int, int, str]:
    """Do what is left of `load_runner` once the weights are there."""
    context = _context_of(config, loaded)
    kv_dtype = kv_dtype_of(config, kernels)
    attend_as_asked(config, kernels, loaded, kv_dtype)
    # Before anything is multiplied: layers that are made later find no scratch.
    shared = _share_memory(
        config,
        folder,
        kernels,
        loaded,
        token_budget=token_budget,
        context=context,
        times=times,
        early=early,
    )
    prefill, memory = shared.prefill, shared.memory
    token_bytes = kv_bytes_per_token(loaded, kv_dtype)
    log.info("prefill_weights", serves=prefill.describe())
    log.info("gpu_memory", plan=memory.describe())
    times.mark("largest step")
    model, found = prefill.model, None
    if kv_dtype == FLOAT8:
        found = find_scales(model, kernels, folder, config.load_format)
        log.info("kv_scales", source=found.source, scales=found.listed())
        times.mark("KV scales")

    overlap = overlap_of(config.phase_overlap, model, kernels.device, kernels.capability)
    why = why_off(config.phase_overlap, model, kernels.capability)
    log.info("phase_overlap", serves=f"off: {why}" if why else "decodes and prompts at once")

    def make(kv_share: float) -> tuple[CudaRunner, int, int]:
        smaller = replace(memory, kv=int(memory.kv * kv_share))
        length, num_blocks = size_pool(config, smaller, context, token_bytes)
        runner = CudaRunner(
            model,
            shared.sampler,
            kernels,
            num_blocks=num_blocks,
            block_size=config.kv_unit_tokens,
            num_slots=config.max_batch_size,
            context_length=length,
            token_budget=token_budget,
            kv_dtype=kv_dtype,
            kv_scales=None if found is None else found.scales,
            paced=config.itl_target_s > 0,
            prefill_weights=prefill.choice.name,
            overlap=overlap,
            early_compile=early,
        )
        return runner, length, num_blocks

    runner, length, num_blocks = capture_within_memory(make, is_fixed=config.kv_cache_tokens > 0)
    times.mark("capture")
    pool = describe_kv(num_blocks * config.kv_unit_tokens, length, token_bytes)
    log.info("kv_pool", holds=pool)
    attention = _describe_attention(kernels, runner, length)
    kv_words = "" if found is None else f"KV in float8, scales {found.describe()}; "
    words = (
        f"{torch.cuda.get_device_name(kernels.device)} ({kernels.name} kernels; {kv_words}"
        f"prefill attention {attention}; prefill weights {prefill.describe()}; {memory.describe()})"
    )
    return runner, length, num_blocks, words


def _context_of(config: EngineConfig, model: CausalLM) -> int:
    """Return the most tokens of a sequence.

    Raises:
        ConfigError: More are asked for than the model holds.
    """
    context = config.context_length or model.config.max_position
    if context > model.config.max_position:
        raise ConfigError(
            f"--context-length {context}: the model holds {model.config.max_position} tokens"
        )
    return context


def _describe_attention(kernels: TritonKernels, runner: CudaRunner, length: int) -> str:
    """Say what computes prompts' attention, here and in the log, and there how decodes go."""
    attention = describe(
        partial(kernels.prefill_shape, runner.model.config.head_dim),
        length,
        wide_tokens=kernels.wide_tokens,
    )
    log.info("prefill_attention", serves=attention)
    heads = runner.model.config
    decodes = kernels.decode_shape(heads.head_dim, heads.num_heads // heads.num_kv_heads)
    log.info("decode_attention", serves=decodes.words)
    log.info("decode_launches", serves=describe_launches(runner.step_graphs.dependent_from))
    return attention


@dataclass(frozen=True)
class _Shared:
    """What lies in the device's memory beside KV."""

    sampler: DeviceSampler
    prefill: Prefill
    memory: MemoryPlan


def _share_memory(
    config: EngineConfig,
    folder: Path,
    kernels: TritonKernels,
    loaded: CausalLM,
    *,
    token_budget: int,
    context: int,
    times: StartTimes,
    early: EarlyCompile | None,
) -> _Shared:
    """Make the sampler and the prompts' copy, measure the plan and the largest step beside them.

    `prefill` is rebound where its copy finds no room: nothing else holds the copy, so that it is
    freed before memory is planned again.

    Raises:
        ConfigError: The copy was asked for by name, and there is no room beside it.
    """
    prefill = copy_for_prompts(config, folder, kernels, loaded)
    times.mark("prompts' weights")
    log.info("weights_loaded", held=describe_weights(prefill.model))

    def measured() -> tuple[DeviceSampler, MemoryPlan]:
        sampler = _make_sampler(config, loaded, kernels)
        _apply_plan(config, kernels, prefill.model, context, times)
        return sampler, plan_memory(
            config, prefill.model, kernels, token_budget, context, early=early
        )

    found = measured() if prefill.choice.format is None else _within_memory(measured)
    if found is None:
        prefill = prefill.dropped("the largest step does not fit beside it")
        gc.collect()
        torch.cuda.empty_cache()
        found = measured()
    sampler, memory = found
    token_bytes = kv_bytes_per_token(loaded, kv_dtype_of(config, kernels))
    was, needed = prefill.choice.format, (config.kv_cache_tokens or context) * token_bytes
    prefill = prefill.in_room(
        kv_bytes=memory.kv, needed_bytes=needed, is_fixed=config.kv_cache_tokens > 0
    )
    if prefill.choice.format is not was:
        gc.collect()
        memory = plan_memory(config, prefill.model, kernels, token_budget, context)
    return _Shared(sampler, prefill, replace(memory, prompt_weights=prefill.copy_bytes))


def _within_memory(work: Callable[[], T]) -> T | None:
    """Return what work returns, or None where the device has no memory for it."""
    try:
        return work()
    except (RuntimeError, ConfigError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0]
    log.warning("no_memory_beside_the_copy", error=reason)
    return None


def _make_sampler(config: EngineConfig, model: CausalLM, kernels: TritonKernels) -> DeviceSampler:
    return DeviceSampler(
        config.max_batch_size,
        model.config.vocab_size,
        model.config.eos_token_ids,
        config.seed,
        device=kernels.device,
    )


def _apply_plan(
    config: EngineConfig, kernels: TritonKernels, model: CausalLM, context: int, times: StartTimes
) -> None:
    """Find or measure the plan, if one is asked for; its timer's memory is free afterwards."""
    if config.plan == "off":
        return
    settle(
        config.plan,
        kernels,
        model,
        longest=context,
        timer=device_timer(kernels.device),
        kv_dtype=kv_dtype_of(config, kernels),
        unit=config.kv_unit_tokens,
    )
    times.mark("plan")


def copy_for_prompts(
    config: EngineConfig, folder: Path, kernels: TritonKernels, model: CausalLM
) -> Prefill:
    """Choose what serves prompts, and make it where memory allows.

    Raises:
        ConfigError: A copy was asked for that cannot be made, or one was named and the accuracy
            record is damaged.
    """
    choice = choose(config.prefill_weights, kernels, model, _known(config, folder, kernels))
    torch.cuda.empty_cache()  # what loading left behind is free for the copy
    free, total = torch.cuda.mem_get_info()
    allowed = int(total * config.gpu_memory_utilization) - torch.cuda.memory_allocated()
    made = make_copy(choice, model, kernels, free_bytes=min(free, allowed))
    torch.cuda.synchronize(kernels.device)
    return made


def _known(config: EngineConfig, folder: Path, kernels: TritonKernels) -> Known:
    """Return what was measured of the checkpoint; by `auto`, what cannot be read is nothing."""
    if config.prefill_weights == "same" or config.load_format == "dummy":
        return Known()
    try:
        return known(folder, Numerics.of(config, kernels.name_of_dtype, kernels.capability))
    except ConfigError as error:
        if config.prefill_weights != "auto":
            raise
        log.warning("accuracy_record_not_read", reason=str(error))
    return Known()


@dataclass(frozen=True)
class _Concession:
    """A smaller configuration, for where a larger one found no memory."""

    detail: Detail
    kv_share: float
    words: str


_CONCESSIONS = (
    _Concession("all", 1.0, "nothing"),
    _Concession("few", 1.0, "captured graphs: most sizes of steps with prompts, half of decodes'"),
    _Concession("decodes", 1.0, "captured graphs: all of steps with prompts, half of decodes'"),
    _Concession("decodes", 0.9, "those graphs, and 10 % of the KV pool"),
    _Concession("decodes", 0.75, "those graphs, and 25 % of the KV pool"),
    _Concession("decodes", 0.5, "those graphs, and half of the KV pool"),
)


def capture_within_memory(
    make: Callable[[float], tuple[CudaRunner, int, int]], *, is_fixed: bool
) -> tuple[CudaRunner, int, int]:
    """Make a runner and capture its graphs; where memory is short, give up graphs, then KV.

    Args:
        make: Of the share of the planned KV pool: (runner, context length, blocks).
        is_fixed: Whether the pool's size was asked for, so that it must not shrink.

    Raises:
        ConfigError: The least configuration does not fit either.
    """
    reason = ""
    for concession in _CONCESSIONS:
        if is_fixed and concession.kv_share < 1.0:
            break
        made, begun_s = None, time.monotonic()
        try:
            made = make(concession.kv_share)
            made[0].capture(concession.detail)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
        else:
            seconds = round(time.monotonic() - begun_s, 2)
            log.info("graphs_captured", seconds=seconds, given_up=concession.words)
            return made
        # Not in the clause above: its traceback keeps alive what is to be freed.
        made = None
        gc.collect()
        torch.cuda.empty_cache()
        log.warning("no_memory_for_graphs", given_up_so_far=concession.words, error=reason)
    what = "--kv-cache-tokens" if is_fixed else "--gpu-memory-utilization"
    raise ConfigError(
        f"the GPU has no memory left for captured graphs ({reason}): lower {what}, "
        "--max-batch-size or --max-num-batched-tokens, or end what else runs on it"
    )


def kv_dtype_of(config: EngineConfig, kernels: TritonKernels) -> torch.dtype:
    """Return the dtype that KV is kept in.

    Raises:
        ConfigError: float8 is asked for, and the GPU does not have it.
    """
    if not config.kv_is_float8:
        return kernels.dtype
    major, minor = kernels.capability
    if (major, minor) < FLOAT8_CAPABILITY:
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: this GPU's compute capability is "
            f"{major}.{minor}, and float8 (e4m3) needs 8.9 or later (Ada, Hopper); use auto"
        )
    return FLOAT8


def plan_memory(
    config: EngineConfig,
    model: CausalLM,
    kernels: TritonKernels,
    token_budget: int,
    context: int,
    *,
    early: EarlyCompile | None = None,
) -> MemoryPlan:
    """Measure the largest step and give KV what is left of the allowed share.

    Args:
        config: The settings.
        model: On the device.
        kernels: The model's.
        token_budget: Most rows of a step.
        context: Most tokens of a sequence.
        early: Compiles what the step needs, before it is measured.
    """
    is_apart = why_off(config.phase_overlap, model, kernels.capability) is None
    sampled = config.max_batch_size

    def steps(model: CausalLM, layers: Sequence[int] | None = None) -> tuple[int, int]:
        measured = partial(
            measure_step, model, kernels, sampled=sampled, context=context, layers=layers
        )
        # What one stream has freed no other gets: decodes' rows lie beside the prompts'.
        most = measured(rows=token_budget)
        return most, measured(rows=min(sampled, token_budget)) if is_apart else 0

    if early is not None:
        # First of all: cuBLAS's workspaces, which stay, are then counted beside the weights.
        early.before(partial(steps, *model.shallow()), since="largest step")
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_allocated()
    activations, beside = steps(model)
    apart = 0
    if is_apart:
        # So do logits and the joined rows; once in graphs and once out of them.
        apart = 2 * (beside + token_budget * model.config.hidden_size * 4)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    allowed = int(total * config.gpu_memory_utilization)
    # CUDA's own context: what the driver counts for a process and torch does not; other
    # processes' memory cannot be told from it, so it is taken at a fixed figure.
    later = _GRAPH_BYTES + later_bytes(config, model, kernels, token_budget, context) + activations
    later += apart
    if config.cpu_offload_gib:
        later += STAGING_BYTES
    overhead = (600 << 20) + later
    kv = min(allowed - weights - activations - overhead, free - activations - later)
    return MemoryPlan(total, allowed, weights, activations, overhead, max(kv, 0))


def later_bytes(
    config: EngineConfig,
    model: CausalLM,
    kernels: TritonKernels,
    token_budget: int,
    context: int,
) -> int:
    """Return what is allocated after the plan: graphs' logits, scratch, block tables."""
    shape, slots = model.config, config.max_batch_size
    block_m = kernels.prefill_shape(shape.head_dim, context).block_m
    mixed = mixed_frames(slots, token_budget, block_m, paced=config.itl_target_s > 0)
    tables = table_bytes(slots, context, config.kv_unit_tokens, mixed)
    frames = [*map(Frame, graph_buckets(slots)), *mixed]
    rows = sum(frame.decodes + frame.prompts for frame in frames)
    splits = -(-context // kernels.decode_shape(shape.head_dim).split)
    scratch = slots * shape.num_heads * splits * (shape.head_dim + 1) * 4
    most = most_sequences(slots, mixed)
    units = kernels.wide_units(shape.head_dim, sequences=most, longest=context)
    scratch += WidenedKv.bytes_of(units, shape.num_kv_heads, shape.head_dim, kernels.dtype)
    return rows * shape.vocab_size * kernels.dtype.itemsize + scratch + tables


@torch.inference_mode()
def measure_step(
    model: CausalLM,
    kernels: TritonKernels,
    *,
    rows: int,
    sampled: int,
    context: int,
    layers: Sequence[int] | None = None,
) -> int:
    """Return the bytes that a step of `rows` prompt tokens takes beside weights and KV.

    Args:
        model: What is run.
        kernels: The model's.
        rows: Of prompts.
        sampled: Most rows that there are logits of.
        context: Most tokens of a sequence.
        layers: Which of its layers a shallow model has; None: all.
    """
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    size = 16
    lengths = np.full(-(-rows // context), context, dtype=np.int32)
    lengths[-1] = rows - context * (len(lengths) - 1)
    width = -(-int(lengths.max()) // size)
    blocks = width * len(lengths)
    cache = allocate_kv(model, blocks, size, kernels.dtype, kernels.device)
    caches = cache if layers is None else [cache[index] for index in layers]
    pool = torch.cuda.memory_allocated() - before
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    shape = kernels.prefill_shape(model.config.head_dim, int(lengths.max()))
    tiles = cut_tiles(lengths, lengths, first_sequence=0, block_m=shape.block_m)
    positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
    owner = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)

    def here(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32)).to(kernels.device)

    batch = DeviceBatch(
        query_starts=here(starts),
        kv_lens=here(lengths),
        block_tables=here(np.arange(blocks).reshape(len(lengths), width)),
        positions=here(positions),
        slots=here(owner * width * size + positions),
        max_query_len=int(lengths.max()),
        max_kv_len=int(lengths.max()),
        num_decodes=0,
        tiles=here(tiles),
        shape=shape,
    )
    ids = torch.zeros(rows, dtype=torch.int64, device=kernels.device)
    hidden = model.forward(ids, batch, caches)
    logits = model.logits(hidden[:sampled])
    # A step that is asked for log-probabilities copies logits and what it makes of them.
    copies = torch.empty(3, *logits.shape, dtype=torch.float32, device=kernels.device)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - pool
    del hidden, logits, copies, cache, caches
    return peak


def size_pool(
    config: EngineConfig, plan: MemoryPlan, context: int, bytes_per_token: int
) -> tuple[int, int]:
    """Return (context length in tokens, KV blocks).

    Raises:
        ConfigError: The pool cannot hold one sequence of the context.
    """
    size = config.kv_unit_tokens
    pool = config.kv_cache_tokens or plan.kv // bytes_per_token
    num_blocks = pool // size
    if not config.context_length:
        context = min(context, num_blocks * size)
    if num_blocks < 1 or context > num_blocks * size:
        raise ConfigError(
            f"the KV pool holds {num_blocks * size} tokens, less than one sequence of "
            f"--context-length {context} ({plan.describe()}): raise --gpu-memory-utilization or "
            "--kv-cache-tokens, or lower --context-length or --max-num-batched-tokens"
        )
    return context, num_blocks
