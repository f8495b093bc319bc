"""From settings to a warmed-up engine: threads, model, KV pool, warm-up."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import structlog

from tailrace.clock import monotonic
from tailrace.engine.block_manager import BlockManager
from tailrace.engine.engine import Engine
from tailrace.engine.garbage import collecting_nothing
from tailrace.engine.gate import Gate
from tailrace.engine.hang_watch import HangWatch
from tailrace.engine.late_binding import LateBinding
from tailrace.engine.pace import LEAST_SHARE, Pace
from tailrace.engine.scheduler import Scheduler
from tailrace.engine.start_times import StartTimes
from tailrace.engine.step_probes import ProbeRun, choose
from tailrace.engine.step_time import StepTimeModel
from tailrace.errors import ConfigError, EngineError
from tailrace.kernels import compile_process
from tailrace.models.config import load_config
from tailrace.telemetry.host_memory import host_room
from tailrace.text.grammar import GrammarCompiler
from tailrace.types import EngineReady, EngineRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

    from tailrace.config import EngineConfig
    from tailrace.engine.host_kv import CopyCosts, HostKv
    from tailrace.engine.step_runner import StepRunner
    from tailrace.engine.step_time import StepLoad
    from tailrace.models.causal_lm import CausalLM
    from tailrace.telemetry.host_memory import Room

log = structlog.get_logger("tailrace.engine")


@dataclass(frozen=True)
class Loaded:
    """What `load` brings."""

    model: CausalLM
    runner: StepRunner
    blocks: BlockManager
    context_length: int
    device: str
    grammars: GrammarCompiler | None
    step_time: StepTimeModel = field(default_factory=StepTimeModel)
    host: HostMemory | None = None
    prompts_apart: bool = False
    """Whether prompts go by a copy of the weights of their own."""


@dataclass(frozen=True)
class HostMemory:
    """Memory for the KV of preempted sequences; see engine/host_kv.py."""

    places: int
    """Units that it holds."""
    unit_bytes: int
    copies: CopyCosts
    """Of copies to it and back, measured."""


def thread_count(asked: int) -> int:
    """Return the threads to compute with: those asked for, or the cores this process may use."""
    return asked or len(_cores())


def _cores() -> list[int]:
    # The main thread's (its id is the process id), which floats; the runner's own is bound to one.
    return sorted(os.sched_getaffinity(os.getpid()))


def pin_threads(asked: int) -> None:
    """Bind OpenMP's threads to cores and bound their spinning; OpenMP reads this when it starts.

    OpenMP starts when torch is imported, and binds the thread that imports it: that is the
    runner's (see worker.main), so the main thread keeps all cores to itself and floats.

    A waiting thread spins for tens of microseconds, then sleeps. The default, spinning for ever,
    wins nothing measurable on quiet cores, and where anything else runs on them (the front end
    does) a step's few hundred barriers each cost a time slice: decode fell from 70 to 4 tokens/s.
    Sleeping at once costs a third of the decode rate. See docs/performance.md.
    """
    cores = _cores()[: thread_count(asked)]
    os.environ.setdefault("OMP_NUM_THREADS", str(len(cores)))
    os.environ.setdefault("GOMP_CPU_AFFINITY", " ".join(map(str, cores)))
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")


def resolve(config: EngineConfig) -> Path:
    """Find the checkpoint's folder, converting a GGUF file on its first use."""
    from tailrace.models import gguf  # noqa: PLC0415 -- see worker._build: torch comes late

    return gguf.resolve(config.model_path)


def load(
    config: EngineConfig,
    folder: Path,
    *,
    times: StartTimes | None = None,
    grammars: Callable[[], Future[GrammarCompiler]] | None = None,
) -> Loaded:
    """Load the model and allocate the KV pool; runs on the runner's thread.

    Args:
        config: The settings.
        folder: Of the checkpoint.
        times: Where the phases are marked.
        grammars: Begins `load_grammars` on another thread the first time, and returns what it
            brings; None: it is called here.

    Raises:
        ConfigError: The KV pool cannot hold the context asked for.
        ModelError: The checkpoint cannot be served.
    """
    times = times or StartTimes()
    if config.gpus:
        return _load_on_gpu(config, folder, times, grammars)
    if grammars is not None:
        grammars()
    # torch comes with these, and is imported on this thread; see `pin_threads`.
    with collecting_nothing():
        from tailrace.engine.runner import Runner, kv_bytes_per_token  # noqa: PLC0415
        from tailrace.engine.sampler import Sampler  # noqa: PLC0415
        from tailrace.kernels.select import select  # noqa: PLC0415
        from tailrace.models.loader import describe_weights, load_model  # noqa: PLC0415

    times.mark("import")
    threads = thread_count(config.threads)
    kernels = select(config.cpu_kernels, threads)
    dtype = "float16" if config.dtype == "auto" else config.dtype
    model = load_model(
        folder,
        dtype=dtype,
        kernels=kernels,
        load_format=config.load_format,
        quant_type=config.quant_type,
        seed=config.seed,
    )
    times.mark("weights")
    context, num_blocks = size_kv(config, model.config.max_position, kv_bytes_per_token(model))
    pool = describe_kv(num_blocks * config.kv_unit_tokens, context, kv_bytes_per_token(model))
    log.info("kv_pool", holds=pool, kv_cache_gib=config.kv_cache_gib)
    sampler = Sampler(
        config.max_batch_size, model.config.vocab_size, model.config.eos_token_ids, config.seed
    )
    runner = Runner(
        model,
        sampler,
        num_blocks=num_blocks,
        block_size=config.kv_unit_tokens,
        num_slots=config.max_batch_size,
    )
    unit_bytes = config.kv_unit_tokens * kv_bytes_per_token(model)

    def room() -> Room:
        # Nothing was written to the pool yet, so the system does not count it as taken.
        return host_room().less(num_blocks * unit_bytes, "the KV pool")

    host = take_host_memory(config, runner, unit_bytes, room)
    times.mark("memory")
    compiler = _waited_for(grammars, folder, times)
    return Loaded(
        model=model,
        runner=runner,
        blocks=make_blocks(config, num_blocks, prefix_cache=config.prefix_cache, host=host),
        context_length=context,
        host=host,
        device=f"cpu ({threads} threads, {kernels.name} kernels, {describe_weights(model)})",
        grammars=compiler,
    )


def _load_on_gpu(
    config: EngineConfig,
    folder: Path,
    times: StartTimes,
    grammars: Callable[[], Future[GrammarCompiler]] | None,
) -> Loaded:
    # What compiles kernels imports as much as this process, and is to be ready for the first ones.
    compiler = compile_process.begin_if_cold()
    try:
        # Triton is imported with these: a CPU build of torch has none.
        with collecting_nothing():
            from tailrace.engine.cuda_setup import load_runner  # noqa: PLC0415
    except BaseException as error:
        if compiler is not None:
            compile_process.end(compiler)
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            raise ConfigError(
                f"--gpus {config.gpus[0]}: Triton is not installed, which compiles the kernels; it "
                "comes with torch's builds for CUDA: install one, or leave --gpus out"
            ) from error
        raise
    times.mark("import")
    runner, context, num_blocks, device = load_runner(
        config, folder, token_budget(config), times, compiler=compiler, meanwhile=grammars
    )
    host = take_host_memory(config, runner, runner.unit_bytes, host_room)
    times.mark("memory")
    return Loaded(
        model=runner.model,
        runner=runner,
        host=host,
        blocks=make_blocks(
            config,
            num_blocks,
            prefix_cache=config.prefix_cache,
            host=host,
            computed_by=runner.prefill_weights,
        ),
        context_length=context,
        device=device,
        grammars=_waited_for(grammars, folder, times),
        prompts_apart=runner.prefill_weights != "same",
    )


def describe_kv(num_tokens: int, context: int, bytes_per_token: int) -> str:
    """Say what a KV pool holds: GiB, tokens, and how many sequences of the longest context."""
    gib = num_tokens * bytes_per_token / 2**30
    full = num_tokens // context
    return (
        f"{num_tokens:,} tokens in {gib:.2f} GiB: {full} sequences of {context:,}, or more shorter"
    )


def load_grammars(folder: Path) -> GrammarCompiler:
    """Read the tokenizer for grammars; neither torch nor the model is needed.

    Most of it holds the interpreter: beside an import it costs a start as much as after it, and
    nothing while the start waits for other processes.

    Raises:
        ModelError: The folder's config.json cannot be used.
    """
    config = load_config(folder)
    grammars = GrammarCompiler(folder, config.vocab_size, config.eos_token_ids)
    grammars.load()
    return grammars


def _waited_for(
    grammars: Callable[[], Future[GrammarCompiler]] | None, folder: Path, times: StartTimes
) -> GrammarCompiler:
    compiler = load_grammars(folder) if grammars is None else grammars().result()
    times.mark("tokenizer")
    return compiler


class KeepsOnHost(Protocol):
    """A runner that can copy KV to the host and back."""

    def keep_on_host(self, num_places: int) -> HostKv:
        """Allocate host memory for so many units."""
        ...


def take_host_memory(
    config: EngineConfig, runner: KeepsOnHost, unit_bytes: int, room: Callable[[], Room]
) -> HostMemory | None:
    """Allocate `--cpu-offload-gib` of host memory and time copies to it; None where it is 0.

    Args:
        config: The settings.
        runner: Whose KV will be copied.
        unit_bytes: Of a unit of KV.
        room: Returns what may be taken of the host's memory.

    Raises:
        ConfigError: It is less than a unit, or more than the room.
    """
    asked = int(config.cpu_offload_gib * 2**30)
    if not asked:
        return None
    places = asked // unit_bytes
    if not places:
        raise ConfigError(
            f"--cpu-offload-gib {config.cpu_offload_gib}: a unit of KV is {unit_bytes} bytes; "
            "raise it to several of them"
        )
    left = room()
    if asked > left.free_bytes:
        raise ConfigError(
            f"--cpu-offload-gib {config.cpu_offload_gib}: {left.free_bytes / 2**30:.2f} GiB are "
            f"left of {left.limit}; lower it, or give this process more memory"
        )
    started_s = time.monotonic()
    kept = runner.keep_on_host(places)
    copies = kept.measure()
    most = copies.part_units
    log.info(
        "host_kv",
        gib=round(kept.nbytes / 2**30, 3),
        units=places,
        copied_gb_per_s=round(most * unit_bytes / copies.seconds(most) / 1e9, 2),
        copy_s=float(f"{copies.part_s:.3g}"),
        seconds=round(time.monotonic() - started_s, 2),
    )
    return HostMemory(places, unit_bytes, copies)


def swap_pays(loaded: Loaded) -> Callable[[int, int], bool] | None:
    """Return what tells whether (tokens, units) are better copied out and back than computed again.

    Tokens computed again go into steps that run anyway, and are full where memory is short. Before
    the model of step time is fitted (without warm-up) copying is taken to be the quicker.
    """
    host = loaded.host
    if host is None:
        return None

    def pays(tokens: int, units: int) -> bool:
        costs = loaded.step_time.costs
        if costs is None:
            return True
        return 2 * host.copies.seconds(units) < costs.again_s(tokens)

    return pays


def make_blocks(
    config: EngineConfig,
    num_units: int,
    *,
    prefix_cache: bool,
    host: HostMemory | None = None,
    computed_by: str = "same",
) -> BlockManager:
    """Make the pool's block manager; `computed_by` are the weights that prompts' KV comes of."""
    return BlockManager(
        num_units,
        config.kv_unit_tokens,
        prefix_cache=prefix_cache,
        mixed_sizes=config.mixes_block_sizes,
        host_places=host.places if host is not None else 0,
        computed_by=computed_by,
    )


def size_kv(config: EngineConfig, max_position: int, bytes_per_token: int) -> tuple[int, int]:
    """Return (context length in tokens, KV units).

    Raises:
        ConfigError: The context asked for exceeds the model's, or the pool cannot hold it.
    """
    size = config.kv_unit_tokens
    asked = config.context_length
    if asked > max_position:
        raise ConfigError(f"--context-length {asked}: the model holds {max_position} tokens")
    pool = config.kv_cache_tokens or int(config.kv_cache_gib * 2**30) // bytes_per_token
    num_blocks = pool // size
    context = asked or min(max_position, num_blocks * size)
    if num_blocks < 1 or context > num_blocks * size:
        raise ConfigError(
            f"the KV pool holds {num_blocks * size} tokens, less than one sequence of "
            f"--context-length {context}: raise --kv-cache-gib ({config.kv_cache_gib}) or "
            "--kv-cache-tokens, or lower --context-length"
        )
    return context, num_blocks


# Against 512, prefill loses about 7 %, and the streams that share its steps wait a quarter of the
# time for their next token. See docs/performance.md.
_CPU_TOKEN_BUDGET = 128
_GPU_TOKEN_BUDGET = 1024


def token_budget(config: EngineConfig) -> int:
    """Return the most tokens of a step: as set, or what suits the device."""
    usual = _GPU_TOKEN_BUDGET if config.gpus else _CPU_TOKEN_BUDGET
    return config.max_num_batched_tokens or max(usual, config.max_batch_size)


def watched(
    config: EngineConfig, loaded: Loaded, submit: Callable[..., Future[Any]]
) -> Callable[..., Future[Any]]:
    """Return `submit`, its steps watched from now on if a step has a limit (`--step-timeout-s`)."""
    if not config.step_limit_s:
        return submit
    watch = HangWatch(submit, loaded.runner, config.step_limit_s)
    watch.start()
    return watch.submit


def make_engine(config: EngineConfig, loaded: Loaded, submit: Callable[..., Future[Any]]) -> Engine:
    """Put the pieces together."""
    scheduler = Scheduler(
        loaded.blocks,
        max_batch_size=config.max_batch_size,
        token_budget=token_budget(config),
        padded_decodes=loaded.runner.padded_decodes,
        whole_prompts=loaded.runner.whole_prompts,
        pace=_pace(config, loaded),
        swap_pays=swap_pays(loaded),
    )
    gate = Gate(scheduler, loaded.step_time, max_ttft_s=config.max_ttft)
    return Engine(
        scheduler,
        loaded.runner,
        submit=submit,
        clock=monotonic,
        context_length=loaded.context_length,
        vocab_size=loaded.model.config.vocab_size,
        eos_token_ids=loaded.model.config.eos_token_ids,
        step_time=loaded.step_time,
        late_binding=LateBinding() if config.late_binding else None,
        grammars=loaded.grammars,
        gate=gate,
        block_bytes=loaded.host.unit_bytes if loaded.host is not None else 0,
    )


def _pace(config: EngineConfig, loaded: Loaded) -> Pace | None:
    if not config.itl_target_s:
        return None
    return Pace(
        loaded.step_time,
        target_s=config.itl_target_s,
        least_tokens=max(1, token_budget(config) // LEAST_SHARE),
        round_down=loaded.runner.whole_prompts,
    )


def warm_up(
    config: EngineConfig,
    loaded: Loaded,
    submit: Callable[..., Future[Any]],
    times: StartTimes | None = None,
) -> float:
    """Run a few short requests through the real path, then time steps; return the seconds it took.

    They go through an engine of their own, so that no counter and no cache entry of theirs stays.
    First calls compile, page in weights and start thread pools: no client should wait for that.

    Raises:
        EngineError: A warm-up request failed, so no client's would succeed.
    """
    times = times or StartTimes()
    started_s = time.monotonic()
    blocks = make_blocks(config, loaded.blocks.num_units, prefix_cache=False)
    engine = make_engine(config, replace(loaded, blocks=blocks), submit)
    # On a GPU each length class has kernels of its own, compiled at their first use.
    lengths = (64, 64, 1100, 3100) if config.gpus else (64,) * 4
    for i, longest in enumerate(lengths):
        length = max(1, min(longest, engine.context_length - 2))
        ids = [(i + 7 * k) % engine.vocab_size for k in range(length)]
        sampling = SamplingParams(max_tokens=2, ignore_eos=True, temperature=float(i % 2))
        request = EngineRequest(
            request_id=f"warmup-{i}",
            token_ids=ids,
            sampling=sampling,
            arrival_s=monotonic(),
        )
        refused = engine.add(request)
        if refused is not None:
            raise EngineError(f"warm-up failed: {refused.error}")
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason == "error":
                raise EngineError(f"warm-up failed: {output.error}")
    times.mark("warm-up")
    fit_step_time(config, loaded, submit)
    times.mark("probes")
    return time.monotonic() - started_s


_PROBES_S = 1.0
"""Of warm-up; the last probe may overrun it."""
_CPU_PROBE_SHARE = 16
"""One part in so many of a CPU's KV pool is written to: its pages cost nothing before they are."""


def fit_step_time(
    config: EngineConfig, loaded: Loaded, submit: Callable[..., Future[Any]]
) -> list[tuple[StepLoad, float]]:
    """Time a dozen shapes of steps and fit the model of step time to them.

    Returns:
        What was measured: load and seconds of each shape.
    """
    blocks = make_blocks(config, loaded.blocks.num_units, prefix_cache=False)
    tokens = blocks.num_units * blocks.unit_tokens
    probes = choose(
        max_batch_size=config.max_batch_size,
        token_budget=token_budget(config),
        context_length=loaded.context_length,
        kv_tokens=tokens if config.gpus else tokens // _CPU_PROBE_SHARE,
        prompts_apart=loaded.prompts_apart,
    )
    run = ProbeRun(loaded.runner, blocks, submit=submit, clock=monotonic)
    samples = run.run(probes, _PROBES_S)
    costs = loaded.step_time.fit(samples, prompts_apart=loaded.prompts_apart)
    errors = [load.seconds(costs) / seconds - 1.0 for load, seconds in samples]
    log.info(
        "step_time_fitted",
        probes=len(samples),
        largest_error=round(max(map(abs, errors)), 3),
        **{
            name: value if isinstance(value, bool) else float(f"{value:.3g}")
            for name, value in msgspec.structs.asdict(costs).items()
        },
    )
    return samples


def ready(
    config: EngineConfig, loaded: Loaded, engine: Engine, load_s: float, warmup_s: float
) -> EngineReady:
    """Describe the running engine to the front ends."""
    return EngineReady(
        context_length=loaded.context_length,
        vocab_size=loaded.model.config.vocab_size,
        eos_token_ids=sorted(engine.eos_token_ids),
        total_blocks=loaded.blocks.num_units,
        block_size=config.kv_unit_tokens,
        device=loaded.device,
        load_s=load_s,
        warmup_s=warmup_s,
        step_costs=loaded.step_time.costs,
    )
