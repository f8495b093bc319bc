"""Plans as files: who wins, where a plan holds, and what is refused with its file and field."""

from __future__ import annotations

import msgspec
import pytest

from tailrace.errors import ConfigError
from tailrace.kernels.plan import (
    MOST_BYTES,
    Key,
    Plan,
    choose,
    folder,
    pin,
    read,
    require,
    usual_file,
    write,
)

KEY = Key(
    gpu="H200 (9.0)", model="28/4 heads of 128", dtype="bfloat16", tailrace="1", torch="2",
    triton="3",
)  # fmt: skip


def choice(seconds, default="usual", refused=()):
    return choose("attention", "below 1024 keys", default, seconds, dict(refused))


@pytest.mark.parametrize(
    ("other_s", "winner"), [(0.96e-3, "other"), (0.98e-3, "usual"), (1.5e-3, "usual")]
)
def test_the_default_serves_unless_another_beats_it_by_the_margin(other_s, winner):
    assert choice({"usual": 1e-3, "other": other_s}).winner == winner


def test_of_several_that_beat_the_default_the_fastest_wins():
    assert choice({"usual": 1e-3, "a": 0.5e-3, "b": 0.4e-3}).winner == "b"


def test_what_is_written_is_read_back(tmp_path):
    plan = Plan(KEY, (choice({"usual": 1e-3, "other": 5e-4}, refused=[("third", "raised")]),))
    file = tmp_path / "plans" / "one.json"
    write(plan, file)
    assert read(file) == plan
    assert [path.name for path in file.parent.iterdir()] == ["one.json"]
    assert plan.winner("attention", "below 1024 keys") == "other"
    assert plan.winner("attention", "longer") is None


def test_a_later_answer_to_a_question_replaces_the_earlier():
    plan = Plan(KEY, (choice({"usual": 1e-3}),)).with_choices([choice({"usual": 2e-3})])
    assert [c.seconds for c in plan.choices] == [{"usual": 2e-3}]


def test_a_plan_without_a_choice_says_nothing_of_its_question():
    first, second = (
        choice({"usual": 1e-3}),
        choose("attention", "longer", "usual", {"usual": 2e-3}, {}),
    )
    plan = Plan(KEY, (first, second))
    assert plan.without([choice({"usual": 9.0})]).choices == (second,)
    assert plan.without([]) == plan


def test_the_description_names_the_key_the_winner_and_every_time():
    seconds = {"usual": 1e-3, "other": 5e-4}
    plan = Plan(KEY, (choice(seconds, refused=[("third", "it raised")]),), pinned=True)
    said = "\n".join(plan.describe())
    for part in ("gpu: H200 (9.0)", "torch: 2", "pinned", "below 1024 keys: other"):
        assert part in said
    assert "500.0 us  other" in said
    assert "1000.0 us  usual (default)" in said
    assert "refused        third: it raised" in said
    assert "memory" not in said


def test_what_lacked_memory_is_described_apart_and_how_it_is_tried_again():
    found = choose(
        "op", "small", "usual", {"usual": 1e-3}, {"a": "it raised"}, no_memory={"b": "2 GiB"}
    )
    said = Plan(KEY, (found,)).describe()
    assert "    refused        a: it raised" in said
    assert "    out of memory  b: 2 GiB" in said
    assert said[-1] == "out of memory: `tailrace plan measure` tries those again"


def test_a_plan_of_before_is_read_although_it_tells_nothing_of_memory(tmp_path):
    file = tmp_path / "old.json"
    plan = Plan(KEY, (choice({"usual": 1e-3}),))
    write(plan, file)
    text = file.read_text()
    assert '"no_memory": {}' in text
    file.write_text(text.replace(',\n      "no_memory": {}', ""))
    assert "no_memory" not in file.read_text()
    assert read(file) == plan


@pytest.mark.parametrize("name", ["gpu", "model", "dtype", "tailrace", "torch", "triton"])
def test_a_plan_of_another_machine_model_or_version_is_refused_by_its_field(tmp_path, name):
    other = msgspec.structs.replace(KEY, **{name: "other"})
    file = tmp_path / "p.json"
    require(Plan(KEY, ()), KEY, file)
    with pytest.raises(ConfigError, match=rf"{file}: measured for {name} 'other', and here it is"):
        require(Plan(other, ()), KEY, file)


def test_versions_do_not_move_the_file_and_all_else_does(monkeypatch, tmp_path):
    monkeypatch.setenv("TAILRACE_CACHE_DIR", str(tmp_path))
    assert usual_file(KEY).parent == folder() == tmp_path / "plans"
    for name in ("gpu", "model", "dtype", "tailrace", "torch", "triton"):
        other = msgspec.structs.replace(KEY, **{name: "other"})
        is_same = name in ("tailrace", "torch", "triton")
        assert (usual_file(other) == usual_file(KEY)) == is_same


GOOD = msgspec.json.encode(Plan(KEY, (choice({"usual": 1e-3}),))).decode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "truncated"),
        ("{", "truncated"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "missing required field `key`"),
        ("[" * 5000, "malformed|truncated|recursion|Expected|maximum"),
        (GOOD.replace('"usual":0.001', '"usual":-1'), r"Expected `float` > 0.0 - at `\$.choices"),
        (GOOD.replace('"dtype"', '"type"'), "unknown field `type`"),
        (GOOD.replace('"format":2', '"format":1'), "format 1, and this version reads 2"),
        ("\xff", "plan"),
        (" " * (MOST_BYTES + 1), "larger than"),
    ],
    ids=["empty", "cut", "array", "bare", "deep", "negative", "field", "format", "latin", "large"],
)
def test_what_is_no_plan_is_refused_by_its_file(tmp_path, content, why):
    file = tmp_path / "p.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"(?s)plan {file}.*({why})"):
        read(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.json")


def test_a_pinned_copy_is_never_written_to(tmp_path):
    source, target = tmp_path / "a.json", tmp_path / "b.json"
    plan = Plan(KEY, (choice({"usual": 1e-3}),))
    write(plan, source)
    pin(source, target)
    assert read(target) == msgspec.structs.replace(plan, pinned=True)
    with pytest.raises(ConfigError, match="is pinned"):
        write(plan, target)
    with pytest.raises(ConfigError, match="exists"):
        pin(source, target)
    write(Plan(KEY, ()), source)
    assert read(source) == Plan(KEY, ())


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"plan .*p\.json: "):
        write(Plan(KEY, ()), tmp_path / "file" / "p.json")
