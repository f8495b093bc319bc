import pytest

from tailrace.config import EngineConfig
from tailrace.engine import setup
from tailrace.errors import ConfigError


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
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    setup.pin_threads(1)
    environ = setup.os.environ
    assert environ["OMP_NUM_THREADS"] == "1"
    assert len(environ["GOMP_CPU_AFFINITY"].split()) == 1
    assert environ["GOMP_SPINCOUNT"] == "7"
    for name in ("OMP_NUM_THREADS", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name)
