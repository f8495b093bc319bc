"""What a start imports, process by process, and what else it reads before a model can be loaded.

    PYTHONPATH=src python benchmarks/start_imports.py [--rounds 3] [--model FOLDER]

Each row is a fresh interpreter: wall and processor seconds (medians), modules, and how many of them
were compiled anew because no .pyc is there or may be written. Below it the packages that take most,
of one more run under `-X importtime`. No GPU is needed, but the build of torch that serves one:
what a CUDA build opens is most of a gigabyte. With `--model`, the tokenizer for grammars too.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict

PROCESSES = {
    "front end, engine begun": "import tailrace.cli, tailrace.server.entrance, uvloop",
    "front end": "import tailrace.cli, tailrace.server.entrance, uvloop, tailrace.server.serve",
    "engine, before torch": "import tailrace.engine.worker, tailrace.engine.setup",
    "engine": (
        "import tailrace.engine.worker, tailrace.engine.setup\n"
        "with tailrace.engine.setup.collecting_nothing():\n"
        "    import tailrace.engine.cuda_setup"
    ),
    "compiling worker": (
        "import tailrace.kernels.compile_worker\n"
        "import tailrace.kernels.triton_kernels, tailrace.kernels.sampling.triton"
    ),
}
OTHER = {
    "Triton's own part of keys": ("from triton.runtime.cache import triton_key", "triton_key()"),
    "tokenizer for grammars": (
        "from pathlib import Path; from tailrace.engine.setup import load_grammars",
        "load_grammars(Path({model!r}))",
    ),
}
TIMED = """
import json, os, sys, time
began_s, used_s = time.monotonic(), time.process_time()
{work}
took = [time.monotonic() - began_s, time.process_time() - used_s]
caches = [getattr(module.__spec__, "cached", None) for module in [*sys.modules.values()]
          if getattr(module, "__spec__", None) is not None]
print(json.dumps([*took, len(sys.modules), sum(1 for c in caches if c and not os.path.exists(c))]))
"""
IMPORTED = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s*(\w+)")
MOST_PACKAGES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="", help="A folder with config.json and tokenizer.json.")
    asked = parser.parse_args()
    print(f"{'':<28}{'wall':>8}{'processor':>11}{'modules':>9}{'not compiled':>14}")
    for name, script in PROCESSES.items():
        rows = [timed(script) for _ in range(asked.rounds)]
        wall_s, used_s = (statistics.median(row[i] for row in rows) for i in (0, 1))
        modules, uncompiled = rows[-1][2:]
        print(f"{name:<28}{wall_s:>6.2f} s{used_s:>9.2f} s{modules:>9}{uncompiled:>14}")
        print(f"    {packages(script)}", flush=True)
    for name, (ready, work) in OTHER.items():
        if "{model" in work and not asked.model:
            continue
        rows = [timed(work.format(model=asked.model), ready) for _ in range(asked.rounds)]
        wall_s, used_s = (statistics.median(row[i] for row in rows) for i in (0, 1))
        print(f"{name:<28}{wall_s:>6.2f} s{used_s:>9.2f} s", flush=True)


def timed(work: str, ready: str = "") -> tuple[float, float, int, int]:
    """Return seconds, seconds of a processor, modules, and modules without a .pyc."""
    run = subprocess.run(
        [sys.executable, "-c", f"{ready}\n{TIMED.format(work=work)}"],
        capture_output=True,
        text=True,
        check=True,
    )
    wall_s, used_s, modules, uncompiled = json.loads(run.stdout)
    return wall_s, used_s, modules, uncompiled


def packages(script: str) -> str:
    """Return the packages whose own modules take most, and how many those are."""
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script],
        capture_output=True,
        text=True,
        check=True,
    )
    taken_s: defaultdict[str, float] = defaultdict(float)
    modules = Counter[str]()
    for own_us, package in IMPORTED.findall(run.stderr):
        taken_s[package] += int(own_us) / 1e6
        modules[package] += 1
    most = sorted(taken_s.items(), key=lambda row: -row[1])[:MOST_PACKAGES]
    return ", ".join(f"{name} {taken:.2f} s ({modules[name]})" for name, taken in most)


if __name__ == "__main__":
    main()
