from pathlib import Path

import pytest

from tailrace.bench.plan import read_plan
from tailrace.errors import ConfigError

WHOLE = """
title = "A against B"
pairs = 6
seed = 3
timeout_s = 60

[traffic]
source = "chat70"
max_input_tokens = 512
output_tokens = 32

[limits]
p95_ttft = 2.0
p99_e2e = 10

[search]
low_rps = 0.1
high_rps = 8
trial_s = 20

[steady]
rates = [0.5, 1]

[platform]
name = "two cores"
price_per_hour = 0.1

[[engine]]
name = "a"
kind = "openai"
command = "{SERVER} --port {port} --title 'two words'"

[[engine]]
name = "b"
kind = "openai"
url = "http://127.0.0.1:9"
model = "{MODEL}"
"""
ENVIRON = {"SERVER": "/opt/server", "MODEL": "m"}


def read(tmp_path, text=WHOLE, environ=ENVIRON):
    file = tmp_path / "plan.toml"
    file.write_text(text)
    return read_plan(file, environ=environ)


def refusal(tmp_path, text, environ=ENVIRON):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, environ)
    return str(caught.value)


def test_a_whole_plan_becomes_checked_values(tmp_path):
    plan = read(tmp_path)
    assert plan.title == "A against B"
    assert [str(limit) for limit in plan.limits] == ["p95_ttft=2", "p99_e2e=10"]
    assert plan.engines[0].command == ("/opt/server", "--port", "{port}", "--title", "two words")
    assert plan.engines[1].model == "m"
    assert plan.traffic.output_tokens == "32"
    assert plan.search is not None
    assert plan.search.high_rps == 8
    assert plan.loads == ((0.5, 0), (1.0, 0))
    assert plan.platform.price_per_hour == 0.1
    assert len({plan.seed_of(pair) for pair in range(6)}) == 6


def test_the_result_keeps_the_plan_without_the_values_of_variables(tmp_path):
    raw = read(tmp_path).raw
    assert raw["engine"][0]["command"].startswith("{SERVER}")
    assert "/opt/server" not in str(raw)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "trial_s = 20",
            "trail_s = 20",
            "unknown key 'trail_s' (did you mean 'trial_s'?)",
        ),
        ("pairs = 6", "pears = 6", "unknown key 'pears' (did you mean 'pairs'?)"),
        ("pairs = 6", 'pairs = "6"', "pairs = '6': must be of type int"),
        ("pairs = 6", "pairs = true", "pairs = True: must be of type int"),
        ("seed = 3", "seed = -1", "seed = -1: must be 0 to"),
        ("pairs = 6", "pairs = 0", "pairs = 0: must be at least 1"),
        ("pairs = 6", "warm_requests = 0", "warm_requests = 0: must be 1 to 1000"),
        ("max_input_tokens = 512", "rate_rps = 2", "[traffic] rate_rps: rates are what [search]"),
        ("max_input_tokens = 512", "seed = 2", "[traffic] seed: stands at the top of the plan"),
        ("p95_ttft = 2.0", "p95_tfft = 2.0", "did you mean 'ttft'?"),
        ("p95_ttft = 2.0", 'p95_ttft = "2"', "give seconds"),
        ("high_rps = 8", "high_rps = 0.05", "must be 0 < low < high"),
        ("rates = [0.5, 1]", f"rates = {[1] * 51}", "51 loads: at most 50"),
        ("rates = [0.5, 1]", "rates = [0]", "each must be above 0"),
        ("rates = [0.5, 1]", 'rates = ["1"]', "[steady] rates = ['1']"),
        ("price_per_hour = 0.1", "price_per_hour = 0", "[platform] price_per_hour"),
        ('name = "b"', 'name = "a"', "engine a: the name stands twice"),
        ('name = "b"', 'name = "../b"', "names folders"),
        ('kind = "openai"\nurl', "url", "[[engine b]] has no kind"),
        ('source = "chat70"', 'source = "chat7"', "chat7"),
        ('source = "chat70"', "", "[traffic] has no source"),
        ("[limits]\np95_ttft = 2.0\np99_e2e = 10", "", "[search] needs limits"),
        ("output_tokens = 32", "output_tokens = 32\nusers = 4", "closed loop"),
        ("timeout_s = 60", "timeout_s = 0", "timeout_s = 0: must be above 0"),
        ("timeout_s = 60", "timeout_s = 10", "would in truth be a limit of 10 s; give a timeout"),
        ("title = ", "title = = ", "plan.toml"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(tmp_path, before, after, said):
    assert before in WHOLE
    message = refusal(tmp_path, WHOLE.replace(before, after, 1))
    assert said in message
    assert "plan.toml" in message


def test_a_variable_that_is_not_set_is_named_with_its_place(tmp_path):
    message = refusal(tmp_path, WHOLE, {"SERVER": "x"})
    assert "engine.model: the environment variable MODEL is not set" in message


def test_no_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        read_plan(tmp_path / "nowhere.toml")


def test_paths_count_from_the_plan_s_folder(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("words " * 400)
    plan = read(
        tmp_path,
        WHOLE.replace("[traffic]", '[traffic]\ntext_file = "text"').replace(
            "pairs = 6", 'pairs = 6\ntokenizer = "tok"'
        ),
    )
    assert plan.traffic.text_file == tmp_path / "text"
    assert Path(plan.tokenizer) == tmp_path / "tok"


def test_a_closed_loop_is_measured_by_its_users(tmp_path):
    text = WHOLE.replace("rates = [0.5, 1]", "users = [2, 8]")
    start, end = text.index("[search]"), text.index("[steady]")
    plan = read(tmp_path, text[:start] + text[end:])
    assert plan.search is None
    assert plan.loads == ((None, 2), (None, 8))


def test_nothing_to_measure_is_an_error(tmp_path):
    start, end = WHOLE.index("[search]"), WHOLE.index("[platform]")
    assert "nothing to measure" in refusal(tmp_path, WHOLE[:start] + WHOLE[end:])


@pytest.mark.parametrize("name", ["cpu-llamacpp", "h200-vllm-sglang"])
def test_the_plans_of_this_repository_are_readable(name):
    file = Path(__file__).parents[2] / "plans" / f"{name}.toml"
    environ = dict.fromkeys(
        ("LLAMA_SERVER", "SMOLLM2_F16_GGUF", "MODELS", "VLLM_SITE", "SGLANG_SITE"), "/x"
    )
    plan = read_plan(file, environ=environ)
    assert len(plan.engines) >= 2
    assert plan.pairs >= 6
