from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tailrace.bench.records import STATUSES, Record, read_records, write_records
from tailrace.errors import ConfigError

RECORDS = st.lists(
    st.builds(
        Record,
        index=st.integers(0, 10**6),
        scheduled_s=st.floats(0, 1e6),
        planned_input_tokens=st.integers(1, 10**5),
        planned_output_tokens=st.integers(1, 10**5),
        status=st.sampled_from(sorted(STATUSES)),
        first_token_s=st.none() | st.floats(0, 1e6),
        chunk_s=st.lists(st.floats(0, 1e6), max_size=5),
        error=st.none() | st.text(st.characters(codec="utf-8"), max_size=20),
    ),
    unique_by=lambda record: record.index,
    max_size=10,
)


@given(records=RECORDS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_records_survive_the_file_and_come_back_in_order(tmp_path, records):
    file = tmp_path / "records.jsonl"
    write_records(file, records)
    assert read_records(file) == sorted(records, key=lambda record: record.index)


def test_a_line_that_is_no_record_is_named(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_text('{"index": 1}\n')
    with pytest.raises(ConfigError, match=r"records\.jsonl:1"):
        read_records(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_records(tmp_path / "none.jsonl")


@pytest.mark.parametrize("status", STATUSES)
def test_a_request_that_ended_is_a_success_or_a_failure(status):
    record = Record(
        index=0,
        scheduled_s=0,
        planned_input_tokens=1,
        planned_output_tokens=1,
        status=status,
    )
    assert record.is_ok + record.is_failure == (status != "cancelled")
