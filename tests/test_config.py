from pathlib import Path

import pytest

from tailrace.config import DECODE_KERNELS, Config, EngineConfig, ServerConfig, cache_dir, load
from tailrace.errors import ConfigError


def test_the_command_line_beats_the_environment_beats_the_file_beats_the_default(tmp_path):
    file = tmp_path / "tailrace.toml"
    file.write_text('port = 1000\nmax-batch-size = 4\nhost = "0.0.0.0"\n')
    environ = {"TAILRACE_PORT": "2000", "TAILRACE_MAX_BATCH_SIZE": "8", "HOME": "/x"}
    config = load({"port": 3000, "host": None}, file=file, environ=environ)
    assert config.server.port == 3000
    assert config.engine.max_batch_size == 8
    assert config.server.host == "0.0.0.0"
    assert config.engine.block_size == "auto"


def test_dashes_and_underscores_name_the_same_setting():
    assert load({"block-size": 8}, environ={}) == load({"block_size": 8}, environ={})


@pytest.mark.parametrize("source", ["file", "environment", "command line"])
def test_an_unknown_setting_is_named_with_the_nearest_known_one(tmp_path, source):
    file = tmp_path / "c.toml"
    file.write_text("max-bach-size = 3\n" if source == "file" else "")
    environ = {"TAILRACE_MAX_BACH_SIZE": "3"} if source == "environment" else {}
    overrides = {"max_bach_size": 3} if source == "command line" else {}
    with pytest.raises(ConfigError, match=r"'max-bach-size' \(did you mean 'max-batch-size'\?\)"):
        load(overrides, file=file, environ=environ)


def test_the_block_size_is_a_unit_or_a_mix_of_sizes_over_the_smallest():
    auto = load({}, environ={}).engine
    fixed = load({}, environ={"TAILRACE_BLOCK_SIZE": "32"}).engine
    assert (auto.kv_unit_tokens, auto.mixes_block_sizes) == (8, True)
    assert (fixed.kv_unit_tokens, fixed.mixes_block_sizes) == (32, False)
    assert load({"block_size": 16}, environ={}).engine.kv_unit_tokens == 16


@pytest.mark.parametrize(
    ("setting", "value", "wanted"),
    [
        ("block_size", 12, "--block-size 12: must be one of auto, 8, 16, 32"),
        ("dtype", "float23", "did you mean 'float32'"),
        ("port", 70000, "0 to 65535"),
        ("port", "x", "port"),
        ("max_batch_size", 0, "at least 1"),
        ("quant_type", "awk", "did you mean 'awq'"),
        ("fp8_activations", "few", "--fp8-activations few: must be one of many, all"),
        ("fp8_activations", "all", "a CPU rounds no activation to FP8; leave it out"),
        ("prefill_weights", "fp9", "did you mean 'fp8'"),
        ("prefill_weights", "bf16", "a CPU serves prompts by the same weights; use auto or same"),
        ("prefill_attention", "hoper", "did you mean 'hopper'"),
        ("prefill_attention", "triton", "both kernels are a GPU's; .* name a GPU with --gpus"),
        ("decode_kernels", "hoper", "did you mean 'hopper'"),
        ("decode_kernels", "triton", "they are a GPU's; .* name a GPU with --gpus"),
        ("decode_kernels", "hopper", "they are a GPU's; .* name a GPU with --gpus"),
        ("phase_overlap", "yes", "--phase-overlap"),
        ("phase_overlap", "on", "a GPU's streams and a second copy .* name a GPU with --gpus"),
        ("gpus", "0,1", "several GPUs is not in this version"),
        ("kv_cache_dtype", "fp8", "float8 needs a GPU .* keeps KV in float32"),
        ("context_length", -1, "at least 0"),
        ("cpu_offload_gib", -1.0, "at least 0"),
        ("cpu_offload_gib", float("inf"), "finite"),
        ("step_timeout_s", -1.0, "--step-timeout-s -1.0: must be auto, 0 (never), or seconds"),
        ("step_timeout_s", "nan", "--step-timeout-s nan: must be auto"),
        ("step_timeout_s", float("inf"), "--step-timeout-s inf: must be auto"),
        ("step_timeout_s", "soon", "--step-timeout-s soon: must be auto"),
        ("max_num_batched_tokens", 3, "--max-num-batched-tokens 3 is below --max-batch-size"),
    ],
)
def test_a_value_out_of_range_or_not_available_is_refused_by_name(setting, value, wanted):
    with pytest.raises(ConfigError, match=wanted.replace("(", r"\(").replace(")", r"\)")):
        load({setting: value}, environ={})


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "bfloat16", "auto"])
def test_a_gpu_keeps_kv_in_the_weights_dtype_or_in_float8(name):
    config = load({"gpus": "0", "kv_cache_dtype": name}, environ={}).engine
    assert config.kv_is_float8 == name.startswith("fp8")
    with pytest.raises(ConfigError, match="weights' dtype, float16, or in fp8"):
        load({"gpus": "0", "dtype": "float16", "kv_cache_dtype": "bfloat16"}, environ={})


def test_hoppers_kernels_may_decode_unless_tritons_are_asked_for():
    asked = [EngineConfig(gpus=(0,), decode_kernels=name) for name in DECODE_KERNELS]
    assert [config.may_decode_by_hopper for config in asked] == [True, False, True]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_hoppers_prefill_kernel_goes_with_either_cache(kv_cache_dtype):
    asked = {"gpus": "0", "prefill_attention": "hopper", "kv_cache_dtype": kv_cache_dtype}
    assert load(asked, environ={}).engine.prefill_attention == "hopper"


def test_lists_are_given_by_comma():
    config = load({"cors_origins": "http://a, http://b"}, environ={})
    assert config.server.cors_origins == ("http://a", "http://b")


def test_a_file_that_cannot_be_read_or_parsed_is_named(tmp_path):
    with pytest.raises(ConfigError, match="missing.toml"):
        load({}, file=tmp_path / "missing.toml", environ={})
    bad = tmp_path / "bad.toml"
    bad.write_text("port = = 3")
    with pytest.raises(ConfigError, match="bad.toml"):
        load({}, file=bad, environ={})


def test_the_flat_form_can_be_loaded_again():
    config = load({"port": 9, "cors_origins": "http://a"}, environ={})
    assert load(config.as_flat(), environ={}) == config


def test_setting_names_are_unique_over_both_classes():
    engine, server = set(EngineConfig().__dict__), set(ServerConfig().__dict__)
    assert not engine & server
    assert len(Config().as_flat()) == len(engine) + len(server)


def test_the_cache_folder_follows_its_variable(monkeypatch):
    monkeypatch.setenv("TAILRACE_CACHE_DIR", "/somewhere")
    assert cache_dir() == Path("/somewhere")
    monkeypatch.delenv("TAILRACE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/tailrace")


def test_the_time_target_is_the_devices_unless_it_was_set():
    assert EngineConfig().itl_target_s == 0.0
    assert EngineConfig(gpus=(0,)).itl_target_s == 0.03
    assert EngineConfig(gpus=(0,), warmup=False).itl_target_s == 0.0
    assert EngineConfig(gpus=(0,), itl_target_ms=0).itl_target_s == 0.0
    assert load({}, environ={"TAILRACE_ITL_TARGET_MS": "12.5"}).engine.itl_target_s == 0.0125


def test_how_long_a_step_may_take_is_the_devices_unless_it_was_set():
    assert EngineConfig().step_limit_s > EngineConfig(gpus=(0,)).step_limit_s > 60.0
    assert EngineConfig(gpus=(0,), step_timeout_s=0).step_limit_s == 0.0
    assert load({}, environ={"TAILRACE_STEP_TIMEOUT_S": "2.5"}).engine.step_limit_s == 2.5


@pytest.mark.parametrize("given", ["soon", -1, "-1", "nan", "inf"])
def test_a_time_target_is_milliseconds(given):
    with pytest.raises(ConfigError, match="--itl-target-ms .*: must be auto, 0"):
        EngineConfig(itl_target_ms=given)


def test_late_binding_needs_the_warm_up_that_times_steps():
    with pytest.raises(ConfigError, match="--late-binding with --no-warmup"):
        EngineConfig(late_binding=True, warmup=False)


def test_a_time_target_needs_the_warm_up_that_times_steps():
    with pytest.raises(ConfigError, match="with --no-warmup: steps are timed at warm-up"):
        EngineConfig(itl_target_ms=30, warmup=False)
