"""What is given up, in which order, where a GPU's memory is short; on a device made of lists."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from structlog.testing import capture_logs

from tailrace.config import EngineConfig
from tailrace.engine import cuda_setup
from tailrace.engine.cuda_setup import MemoryPlan, capture_within_memory
from tailrace.engine.setup import describe_kv
from tailrace.errors import ConfigError
from tailrace.kernels.early_compile import EarlyCompile


class ShortRunner:
    """Captures only what a memory of so many frames allows."""

    def __init__(self, kv_share, device):
        self.kv_share = kv_share
        self.device = device

    def capture(self, detail):
        self.device.tried.append((detail, self.kv_share))
        frames = {"all": 100, "few": 30, "decodes": 10}[detail]
        if 100 * self.kv_share + frames > self.device.room:
            raise self.device.error
        self.detail = detail


class ShortDevice:
    def __init__(self, room, error=None):
        self.room = room
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nMore.")
        self.tried = []

    def make(self, kv_share):
        return ShortRunner(kv_share, self), 4096, int(1000 * kv_share)


@pytest.mark.parametrize(
    ("room", "detail", "blocks"),
    [(200, "all", 1000), (150, "few", 1000), (115, "decodes", 1000), (86, "decodes", 750)],
)
def test_graphs_are_given_up_first_and_then_kv_as_little_as_does(room, detail, blocks):
    device = ShortDevice(room)
    with capture_logs() as logs:
        runner, context, kept = capture_within_memory(device.make, is_fixed=False)
    assert (runner.detail, context, kept) == (detail, 4096, blocks)
    assert device.tried[0] == ("all", 1.0)
    given_up = [entry for entry in logs if entry["event"] == "graphs_captured"]
    assert len(given_up) == 1
    assert (given_up[0]["given_up"] == "nothing") is (detail == "all")
    assert len([entry for entry in logs if entry["event"] == "no_memory_for_graphs"]) == (
        len(device.tried) - 1
    )


def test_a_pool_that_was_asked_for_does_not_shrink():
    device = ShortDevice(90)
    with pytest.raises(ConfigError, match="CUDA out of memory. Tried 2 GiB.*--kv-cache-tokens"):
        capture_within_memory(device.make, is_fixed=True)
    assert {share for _, share in device.tried} == {1.0}


def test_where_nothing_fits_the_start_ends_with_what_to_lower():
    with pytest.raises(ConfigError, match="lower --gpu-memory-utilization"):
        capture_within_memory(ShortDevice(10).make, is_fixed=False)


def test_another_fault_of_a_capture_is_not_taken_for_lack_of_memory():
    device = ShortDevice(10, RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        capture_within_memory(device.make, is_fixed=False)
    assert len(device.tried) == 1


def test_the_plan_and_the_pool_say_what_they_mean():
    gib = 2**30
    plan = MemoryPlan(140 * gib, 126 * gib, 15 * gib, 1 * gib, 2 * gib, 108 * gib)
    assert plan.describe() == (
        "--gpu-memory-utilization allows 126.00 of 140.00 GiB: weights 15.00, largest step 1.00, "
        "context and graphs 2.00, KV 108.00"
    )
    assert describe_kv(100_000, 8192, 57_344) == (
        "100,000 tokens in 5.34 GiB: 12 sequences of 8,192, or more shorter"
    )


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_kernels_are_compiled_ahead_on_a_gpu_alone(device, monkeypatch):
    """A worker is expected before the weights are loaded, and none is left at the end."""
    told = []

    class Early(EarlyCompile):
        def expect(self):
            told.append("expected")

        def close(self):
            told.append("closed")

    def weights(*_):
        told.append("weights")
        return SimpleNamespace(device=torch.device(device)), "model"

    def runner(*_, early, **__):
        told.append(type(early))
        return "runner"

    monkeypatch.setattr(cuda_setup, "EarlyCompile", Early)
    monkeypatch.setattr(cuda_setup, "load_weights", weights)
    monkeypatch.setattr(cuda_setup, "_load_runner", runner)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    assert cuda_setup.load_runner(EngineConfig(gpus=(0,)), Path(), 16) == "runner"
    if device == "cuda":
        assert told == ["expected", "weights", Early, "closed"]
    else:
        assert told == ["weights", type(None), "closed"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("process", ["engine.cuda_setup", "kernels.compile_worker"])
def test_a_start_imports_nothing_that_serving_does_without(process):
    """Each takes a second or more; torch brings them where something asks for a compilation."""
    unwanted = {
        "IPython", "datasets", "matplotlib", "networkx", "pandas", "scipy", "sympy",
        "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.onnx.ops",
        "torch.utils.tensorboard", "torchvision", "transformers",
    }  # fmt: skip
    script = (
        "import sys, tailrace.engine.setup\n"
        f"import tailrace.{process}, tailrace.kernels.triton_kernels\n"
        f"print(*sorted({unwanted} & set(sys.modules)))"
    )
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    )
    assert run.stdout.split() == []
