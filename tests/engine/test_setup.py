import gc
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from tailrace.config import EngineConfig
from tailrace.engine import setup
from tailrace.engine.block_manager import BlockManager
from tailrace.engine.garbage import collecting_nothing
from tailrace.engine.host_kv import CopyCosts, HostKv
from tailrace.engine.start_times import StartTimes
from tailrace.errors import ConfigError
from tailrace.telemetry.host_memory import Room
from tailrace.types import StepCosts
from tests.support.tiny import make_tiny_checkpoint


def test_the_pool_follows_the_memory_given_to_it():
    context, blocks = setup.size_kv(EngineConfig(kv_cache_gib=1.0), 8192, 2**15)
    assert (context, blocks) == (8192, 4096)


def test_tokens_asked_for_beat_the_memory_size():
    assert setup.size_kv(EngineConfig(kv_cache_tokens=100), 64, 1) == (64, 12)


def test_a_small_pool_bounds_the_context_unless_one_was_asked_for():
    assert setup.size_kv(EngineConfig(kv_cache_tokens=100), 8192, 1) == (96, 12)
    with pytest.raises(ConfigError, match="96 tokens, less than one sequence"):
        setup.size_kv(EngineConfig(kv_cache_tokens=100, context_length=97), 8192, 1)


def test_a_context_beyond_the_models_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match="--context-length 9000: the model holds 8192"):
        setup.size_kv(EngineConfig(context_length=9000), 8192, 1)


def test_a_pool_without_a_single_block_is_refused():
    with pytest.raises(ConfigError, match="holds 0 tokens"):
        setup.size_kv(EngineConfig(kv_cache_tokens=7), 8192, 1)


def test_the_token_budget_is_what_was_set_or_at_least_a_token_for_everybody():
    assert setup.token_budget(EngineConfig(max_num_batched_tokens=77)) == 77
    assert setup.token_budget(EngineConfig(max_batch_size=500)) == 500
    assert setup.token_budget(EngineConfig()) >= EngineConfig().max_batch_size


def test_threads_are_pinned_and_their_spinning_bounded_unless_the_user_said_otherwise(monkeypatch):
    for name in ("OMP_NUM_THREADS", "GOMP_CPU_AFFINITY"):
        # Set before, so that what pin_threads sets is undone with it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    setup.pin_threads(1)
    environ = setup.os.environ
    assert environ["OMP_NUM_THREADS"] == "1"
    assert len(environ["GOMP_CPU_AFFINITY"].split()) == 1
    assert environ["GOMP_SPINCOUNT"] == "7"


class Keeper:
    """A runner with a pool of one layer."""

    def __init__(self):
        self.kv_caches = [(torch.zeros(4, 1, 8, 8), torch.zeros(4, 1, 8, 8))]

    def keep_on_host(self, num_places: int) -> HostKv:
        return HostKv(self.kv_caches, num_places)


def test_host_memory_is_taken_in_whole_units_and_copies_are_timed():
    unit = 2 * 8 * 8 * 4
    config = EngineConfig(cpu_offload_gib=10.5 * unit / 2**30)
    host = setup.take_host_memory(config, Keeper(), unit, lambda: Room(11 * unit, "it"))
    assert (host.places, host.unit_bytes) == (10, unit)
    assert host.copies.seconds(1) > 0
    # Where none is asked for, nobody looks what there is.
    assert setup.take_host_memory(EngineConfig(), Keeper(), unit, room=None) is None


def test_host_memory_of_less_than_a_unit_is_refused():
    with pytest.raises(ConfigError, match="--cpu-offload-gib 1e-09: a unit of KV is 512 bytes"):
        setup.take_host_memory(
            EngineConfig(cpu_offload_gib=1e-9), Keeper(), 512, lambda: Room(2**40, "it")
        )


def test_host_memory_beyond_the_room_is_refused_and_told_whose_limit_it_was():
    room = Room(3 * 2**30, "/sys/fs/cgroup/memory.max").less(2**30, "the KV pool")
    told = (
        r"--cpu-offload-gib 2.5: 2.00 GiB are left of /sys/fs/cgroup/memory.max, "
        "less 1.00 GiB of the KV pool; lower it"
    )
    with pytest.raises(ConfigError, match=told):
        setup.take_host_memory(EngineConfig(cpu_offload_gib=2.5), Keeper(), 512, lambda: room)


def test_swapping_pays_where_copying_is_quicker_than_computing_again():
    blocks = BlockManager(4, 8)
    copies = CopyCosts(part_s=1e-3, unit_s=0.4e-3, part_units=50)
    host = setup.HostMemory(places=100, unit_bytes=1, copies=copies)
    loaded = setup.Loaded(None, None, blocks, 64, "", None, host=host)
    pays = setup.swap_pays(loaded)
    assert pays(80, 10)  # nothing is known yet of how long computing takes
    costs = StepCosts(
        base_s=1.0, token_s=1e-4, free_rows=8, attention_s=1e-6, decode_s=0.0, kv_s=0.0
    )
    loaded.step_time.start(costs, np.ones(5))
    # Ten units: 10 ms out and back; 80 tokens: 8 ms, and 3.24 ms for their 3240 pairs.
    assert pays(80, 10)
    assert not pays(60, 8)
    # Where a copy serves prompts, what each token adds is in two terms.
    apart = msgspec.structs.replace(
        costs, token_s=0.5e-4, late_token_s=0.5e-4, prompts_apart=True, prompts_s=0.1
    )
    loaded.step_time.start(apart, np.ones(9))
    assert pays(80, 10)
    assert not pays(60, 8)
    assert setup.swap_pays(setup.Loaded(None, None, blocks, 64, "", None)) is None


def test_phases_are_marked_and_a_tokenizer_read_elsewhere_is_taken(tmp_path):
    folder = make_tiny_checkpoint(tmp_path)
    config = EngineConfig(dtype="float32", threads=1, kv_cache_tokens=64)
    elsewhere, times = Future(), StartTimes()
    elsewhere.set_result(setup.load_grammars(folder))
    loaded = setup.load(config, folder, times=times, grammars=lambda: elsewhere)
    assert loaded.grammars is elsewhere.result()
    assert list(times.seconds) == ["import", "weights", "memory", "tokenizer"]
    here = setup.load(config, folder).grammars
    assert here is not None
    assert here is not loaded.grammars


def test_what_is_imported_is_not_looked_through_for_garbage_and_collecting_goes_on():
    def cannot():
        assert not gc.isenabled()
        raise ImportError

    with pytest.raises(ImportError), collecting_nothing():
        cannot()
    assert gc.isenabled()
    gc.disable()
    try:
        with collecting_nothing():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


class Unimportable:
    """Finds cuda_setup, and fails as what it imports does."""

    def __init__(self, failure):
        self.failure = failure

    def find_spec(self, name, path, target=None):
        if name == "tailrace.engine.cuda_setup":
            raise self.failure


@pytest.mark.parametrize(
    ("failure", "raised", "words"),
    [
        (ImportError("a broken wheel"), ImportError, "a broken wheel"),
        (OSError("libcudart.so.12: cannot open"), OSError, "libcudart"),
        (ModuleNotFoundError("no", name="triton"), ConfigError, "--gpus 0: Triton is not inst"),
    ],
    ids=["import", "library", "triton"],
)
def test_a_gpu_start_that_cannot_import_leaves_no_process_behind(
    failure, raised, words, monkeypatch
):
    ended, times = [], StartTimes()
    monkeypatch.setattr(setup.compile_process, "begin_if_cold", lambda: "begun")
    monkeypatch.setattr(setup.compile_process, "end", ended.append)
    monkeypatch.delitem(sys.modules, "tailrace.engine.cuda_setup", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Unimportable(failure), *sys.meta_path])
    with pytest.raises(raised, match=words):
        setup.load(EngineConfig(gpus=(0,)), Path(), times=times)
    assert ended == ["begun"]
    assert gc.isenabled()


def test_on_a_gpu_the_tokenizer_is_read_when_a_start_waits_or_at_its_end(monkeypatch):
    """It holds the interpreter, so beside the import it would cost as much as after it."""
    told = []

    def load_runner(*_, compiler, meanwhile):
        told.append((compiler, len(read)))
        assert meanwhile is grammars
        return runner, 64, 8, "a GPU"

    def grammars():
        done = Future()
        read.append("compiler")
        done.set_result(read[0])
        return done

    read = []
    runner = SimpleNamespace(model="model", unit_bytes=1, prefill_weights="same")
    fake = SimpleNamespace(load_runner=load_runner)
    monkeypatch.setattr(setup.compile_process, "begin_if_cold", lambda: "begun")
    monkeypatch.setitem(sys.modules, "tailrace.engine.cuda_setup", fake)
    loaded = setup.load(EngineConfig(gpus=(0,)), Path(), grammars=grammars)
    assert told == [("begun", 0)]
    assert loaded.grammars == "compiler"
