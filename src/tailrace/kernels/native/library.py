"""Compile the kernels once per machine, and load them.

The library is kept in `cache_dir()/kernels/<key>/libtailrace.so`. The key is a hash of all that
its code depends on: the source, the flags, the compiler's version and the CPU. It is compiled
into a temporary file beside its place and renamed, so that processes that start together each
find a whole library or none. The folder and the file are private to the user: whoever can write
there can run code as us.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch  # noqa: F401 - loads the OpenMP library that ours calls, for all to see

from tailrace.config import cache_dir
from tailrace.errors import ConfigError

SOURCE_FOLDER = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
# Sums keep their written order: no -ffast-math, whose reassociation would make a row's result
# depend on its neighbours, and whose finite-math would lose the masking of NaN.
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
REMEDY = "install gcc (apt install gcc), or serve with --cpu-kernels torch"
COMPILE_TIMEOUT_S = 120


class Library:
    """The loaded functions; each releases the GIL while it runs.

    Args:
        path: The compiled library.
        threads: Threads of every parallel loop; torch's own number, so that one pool serves both.
    """

    def __init__(self, path: Path, threads: int) -> None:
        self.path = path
        self.threads = threads
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError as error:
            raise ConfigError(
                f"native kernels were compiled but cannot be loaded: {error}; {REMEDY}"
            ) from error
        pointer, size, real = c_void_p, c_int64, c_float
        self.rms_norm = loaded.tailrace_rms_norm
        self.rms_norm.argtypes = [*[pointer] * 4, size, size, real, size]
        self.rms_norm.restype = None
        self.silu_mul = loaded.tailrace_silu_mul
        self.silu_mul.argtypes = [pointer, pointer, size, size, size]
        self.silu_mul.restype = None
        self.rope_and_cache = loaded.tailrace_rope_and_cache
        self.rope_and_cache.argtypes = [*[pointer] * 9, *[size] * 6, real, size]
        self.rope_and_cache.restype = c_int
        self.paged_attention = loaded.tailrace_paged_attention
        self.paged_attention.argtypes = [*[pointer] * 5, *[size] * 5, real, size]
        self.paged_attention.restype = c_int
        loaded.tailrace_isa.restype = c_char_p
        self.isa: str = loaded.tailrace_isa().decode()


class BatchStruct(ctypes.Structure):
    """AttentionBatch as C sees it: `batch_t` in kernels.c."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("kv_lens", c_void_p),
        ("block_tables", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("num_sequences", c_int64),
        ("max_blocks", c_int64),
        ("num_rows", c_int64),
    )


def load(threads: int) -> Library:
    """Return the kernels of this machine, compiled now if they never were.

    Raises:
        ConfigError: There is no compiler, it failed, or what it made cannot be trusted or loaded.
    """
    compiler = find_compiler()
    folder = cache_dir() / "kernels" / library_key(compiler)
    path = folder / "libtailrace.so"
    if not path.exists():
        _make_private(folder)
        compile_library(compiler, path)
    _check_private(folder)
    _check_private(path)
    return Library(path, threads)


def find_compiler() -> list[str]:
    """Return the command of the C compiler: $CC, else the first of cc, gcc and clang.

    Raises:
        ConfigError: None is installed, or $CC names none.
    """
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    wanted = f"$CC is {named[0]!r}, which is not found" if named else "no C compiler found"
    raise ConfigError(f"{wanted}; {REMEDY}")


def library_key(compiler: list[str]) -> str:
    """Return the hash of source, flags, compiler version and CPU."""
    digest = hashlib.sha256()
    for file in sorted(SOURCE_FOLDER.glob("*.c")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    for part in (*compile_flags(), *compiler, _compiler_version(compiler), _cpu_identity()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def compile_flags() -> tuple[str, ...]:
    """Return the flags for this machine's instruction set."""
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return (*FLAGS, "-march=native" if is_x86 else "-mcpu=native")


def compile_library(compiler: list[str], path: Path) -> None:
    """Compile the kernels into `path`, whole or not at all.

    Raises:
        ConfigError: The compiler failed; its last lines are in the message.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".libtailrace-", suffix=".so")
    os.close(handle)
    temporary = Path(name)
    source = str(SOURCE_FOLDER / "kernels.c")
    try:
        _run([*compiler, *compile_flags(), "-shared", source, "-o", name, "-lm"])
        temporary.chmod(0o700)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    """Return what a compiler prints."""
    try:
        done = subprocess.run(  # noqa: S603 - the compiler the user has, on our own source
            command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"compiling the native kernels failed: {error}; {REMEDY}") from error
    if done.returncode != 0:
        last_lines = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise ConfigError(
            f"compiling the native kernels failed: {command[0]} exited {done.returncode}; "
            f"{REMEDY}\n{last_lines}"
        )
    return done.stdout


def _compiler_version(compiler: list[str]) -> str:
    return _run([*compiler, "--version"])


def _cpu_identity() -> str:
    """Return the CPU's model and features: -march=native means something else on another."""
    parts = [platform.machine()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        wanted = ("model name", "cpu family", "model", "flags", "Features", "CPU part")
        first_cpu = cpuinfo.read_text(encoding="utf-8").split("\n\n", 1)[0]
        lines = first_cpu.splitlines()
        parts += [line for line in lines if line.partition(":")[0].strip() in wanted]
    return "\n".join(parts)


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
    except OSError as error:
        raise ConfigError(
            f"native kernels need a folder to be compiled into: {folder}: {error.strerror}; "
            "set $TAILRACE_CACHE_DIR to one that can be written, or use --cpu-kernels torch"
        ) from error


def _check_private(path: Path) -> None:
    """Refuse to load what another user may have written."""
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
        raise ConfigError(
            f"{path} may be written by other users (owner {status.st_uid}, mode "
            f"{status.st_mode & 0o777:o}), so its code is not loaded; remove the folder"
        )
