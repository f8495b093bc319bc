from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.bench.traffic.schedule import Arrival
from tailrace.bench.traffic.trace import read_trace
from tailrace.errors import ConfigError

TRACES = Path(__file__).parents[3].parent / "shared" / "traces"

# Hand-written rows in each published schema: the same three requests.
SAMPLES = {
    "tailrace.csv": (
        "arrival_s,input_tokens,output_tokens,client,reason_ratio\n"
        "0.000,374,44,7,0.5\n1.500,12,3,8,0.1\n4.250,9000,1,7,0\n"
    ),
    "azure2023.csv": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:48.1805900,12,3\n"
        "2023-11-16 18:15:50.9305900,9000,1\n"
    ),
    "azure2024.csv": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00+00:00,374,44\n"
        "2024-05-10 00:00:01.500000+00:00,12,3\n"
        "2024-05-10 00:00:04.250000+00:00,9000,1\n"
    ),
    "burstgpt.csv": (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,"
        "Total tokens,Log Type\n"
        "5,a,1,ChatGPT,374,44,418,Conversation log\n"
        "6.5,b,1,GPT-4,12,3,15,API log\n"
        "7,c,1,GPT-4,12,0,12,API log\n"
        "9.25,c,1,GPT-4,9000,1,9001,API log\n"
    ),
    "burstgpt1.csv": (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,374,44,418,Conversation log\n"
        "6.5,GPT-4,12,3,15,API log\n"
        "9.25,GPT-4,9000,1,9001,API log\n"
    ),
    "mooncake.jsonl": (
        '{"timestamp": 27000, "input_length": 374, "output_length": 44, "hash_ids": [0]}\n'
        '{"timestamp": 28500, "input_length": 12, "output_length": 3, "hash_ids": [1]}\n\n'
        '{"timestamp": 31250, "input_length": 9000, "output_length": 1, "hash_ids": [0, 2]}\n'
    ),
    "bailian.jsonl": (
        '{"chat_id": 1, "timestamp": 61.0, "input_length": 374, "output_length": 44}\n'
        '{"chat_id": 2, "timestamp": 62.5, "input_length": 12, "output_length": 3}\n'
        '{"chat_id": 3, "timestamp": 65.25, "input_length": 9000, "output_length": 1}\n'
    ),
    "ours.jsonl": (
        '{"arrival_s": 0.0, "input_tokens": 374, "output_tokens": 44}\n'
        '{"arrival_s": 1.5, "input_tokens": 12, "output_tokens": 3}\n'
        '{"arrival_s": 4.25, "input_tokens": 9000, "output_tokens": 1}\n'
    ),
}


def _written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


# As published: 16-token blocks, each row a turn with its whole context.
BAILIAN_TURNS = (
    '{"chat_id": 5, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 40, '
    '"output_length": 7, "type": "text", "turn": 1, "hash_ids": [10, 11, 12]}\n'
    '{"chat_id": 6, "parent_chat_id": 5, "timestamp": 75.0, "input_length": 70, '
    '"output_length": 9, "type": "text", "turn": 2, "hash_ids": [10, 11, 13, 14, 15]}\n'
    '{"chat_id": 7, "parent_chat_id": -1, "timestamp": 76.0, "input_length": 20, '
    '"output_length": 9, "type": "search", "turn": 1, "hash_ids": [16, 17]}\n'
)


def test_bailian_blocks_are_16_tokens_and_only_shared_ones_are_kept(tmp_path):
    found = read_trace(_written(tmp_path, "b.jsonl", BAILIAN_TURNS))
    assert found.format == "bailian"
    assert found.block_tokens == 16
    assert [a.prefix_ids for a in found.arrivals] == [(10, 11), (10, 11), ()]
    assert [a.arrival_s for a in found.arrivals] == [0, 13.5, 14.5]


def test_mooncake_blocks_are_512_tokens_and_the_begun_one_is_nobodys(tmp_path):
    # Both have block 2, but only 88 of its tokens.
    row = '{"timestamp": 5, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n'
    found = read_trace(_written(tmp_path, "m.jsonl", row * 2))
    assert found.block_tokens == 512
    assert [a.prefix_ids for a in found.arrivals] == [(1,), (1,)]


def test_a_trace_that_shares_nothing_has_no_blocks(tmp_path):
    row = '{{"timestamp": {0}, "input_length": 600, "output_length": 1, "hash_ids": [{0}]}}\n'
    found = read_trace(_written(tmp_path, "m.jsonl", row.format(1) + row.format(2)))
    assert found.block_tokens == 0
    assert not any(a.prefix_ids for a in found.arrivals)


@pytest.mark.parametrize("ids", ['"a"', "[1.5]", "[true]", '{"a": 1}', "5"])
def test_hash_ids_that_are_none_name_file_and_line(tmp_path, ids):
    text = f'{{"timestamp": 1, "input_length": 9, "output_length": 1, "hash_ids": {ids}}}'
    with pytest.raises(ConfigError, match="m.jsonl:1: hash_ids"):
        read_trace(_written(tmp_path, "m.jsonl", text))


@pytest.mark.parametrize("name", SAMPLES)
def test_every_format_gives_the_same_requests(tmp_path, name):
    found = read_trace(_written(tmp_path, name, SAMPLES[name]))
    times = [arrival.arrival_s for arrival in found.arrivals]
    assert times == pytest.approx([0.0, 1.5, 4.25], abs=1e-5)
    assert [(a.input_tokens, a.output_tokens) for a in found.arrivals] == [
        (374, 44),
        (12, 3),
        (9000, 1),
    ]


def test_rows_of_zero_tokens_are_left_out_and_counted(tmp_path):
    assert read_trace(_written(tmp_path, "b.csv", SAMPLES["burstgpt.csv"])).left_out == 1


def test_rows_out_of_order_are_sorted(tmp_path):
    text = "arrival_s,input_tokens,output_tokens\n9,1,2\n7,3,4\n"
    found = read_trace(_written(tmp_path, "t.csv", text))
    assert found.arrivals == (Arrival(0.0, 3, 4), Arrival(2.0, 1, 2))


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.csv", "arrival_s,input_tokens,output_tokens\n0,1,2\n1,x,2\n", "a.csv:3: input_tokens"),
        ("a.csv", "arrival_s,input_tokens,output_tokens\n0,1\n", "a.csv:2: output_tokens"),
        ("a.csv", "arrival_s,input_tokens,output_tokens\nnan,1,2\n", "a.csv:2: arrival_s"),
        ("a.csv", "arrival_s,input_tokens,output_tokens\n0,-1,2\n", "a.csv:2: input_tokens"),
        ("a.csv", "arrival_s,input_tokens,output_tokens\n0,1.5,2\n", "a.csv:2: input_tokens"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,2\n", "a.csv:2: TIMESTAMP"),
        ("a.csv", "when,how,much\n1,2,3\n", "a.csv:2: columns when, how, much"),
        ("a.csv", "arrival_s,input_tokens,output_tokens\n", "no requests"),
        ("a.csv", "", "no requests"),
        ("a.jsonl", '{"timestamp": 1', "a.jsonl:1: not JSON"),
        ("a.jsonl", "[1]\n", "a.jsonl:1: a request must be a JSON object"),
        ("a.jsonl", '{"timestamp":1,"input_length":true,"output_length":1}\n', "a.jsonl:1: input"),
        ("a.jsonl", '{"timestamp":1,"input_length":[],"output_length":1}\n', "a.jsonl:1: input"),
    ],
)
def test_a_bad_row_names_file_and_line(tmp_path, name, text, where):
    with pytest.raises(ConfigError) as caught:
        read_trace(_written(tmp_path, name, text))
    assert where in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_trace(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.csv")


@given(
    rows=st.lists(
        st.tuples(
            st.floats(0, 1e6),
            st.integers(0, 10**6),
            st.integers(0, 10**6),
        ),
        min_size=1,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(tmp_path, rows):
    lines = [f"{at!r},{asked},{given}" for at, asked, given in rows]
    text = "\n".join(["arrival_s,input_tokens,output_tokens", *lines])
    file = _written(tmp_path, "t.csv", text)
    kept = [row for row in rows if row[1] and row[2]]
    if not kept:
        with pytest.raises(ConfigError):
            read_trace(file)
        return
    found = read_trace(file)
    first_s = min(at for at, _, _ in kept)
    assert found.left_out == len(rows) - len(kept)
    assert sorted((a.arrival_s, a.input_tokens, a.output_tokens) for a in found.arrivals) == sorted(
        (at - first_s, asked, given) for at, asked, given in kept
    )
    assert all(a.arrival_s <= b.arrival_s for a, b in itertools.pairwise(found.arrivals))


@given(data=st.binary(max_size=200), suffix=st.sampled_from([".csv", ".jsonl"]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused(tmp_path, data, suffix):
    file = tmp_path / f"any{suffix}"
    file.write_bytes(b"arrival_s,input_tokens,output_tokens\n" + data)
    try:
        found = read_trace(file)
    except ConfigError as error:
        refusal = str(error)
    else:
        refusal = str(file) if found.arrivals else "neither requests nor an error"
    assert str(file) in refusal


@pytest.mark.parametrize(
    ("name", "requests", "mean_input"),
    [
        ("azure2023_conv.csv", 19366, 1155),
        ("azure2023_code.csv", 8819, 2048),
        ("mooncake_conversation.jsonl", 6635, 12605),
        ("mooncake_synthetic.jsonl", 3993, 15325),
        ("servegen_deepseek_r1_reason.csv", 6000, 1181),
        ("servegen_m_large_chat.csv", 6000, 732),
        ("burstgpt1_first400.csv", 383, 544),
    ],
)
def test_the_shared_traces_are_read_whole(name, requests, mean_input):
    file = TRACES / name
    if not file.is_file():
        pytest.skip(f"{file} is not here")
    found = read_trace(file)
    assert len(found.arrivals) + found.left_out == requests
    mean = sum(a.input_tokens for a in found.arrivals) / len(found.arrivals)
    assert mean == pytest.approx(mean_input, abs=1)
