from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.bench.records import Record
from tailrace.bench.timeline import MAX_BINS, bin_width_s, in_flight, per_second

SPANS = st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e3)), min_size=1, max_size=30)


@given(spans=SPANS, probe_s=st.floats(0, 2e4))
def test_in_flight_counts_what_is_due_and_not_over(spans, probe_s):
    records = [
        Record(
            index=index,
            scheduled_s=start,
            finished_s=start + length,
            planned_input_tokens=1,
            planned_output_tokens=1,
        )
        for index, (start, length) in enumerate(spans)
    ]
    times, counts = in_flight(records)
    assert counts[-1] == 0
    seen = max((i for i, at in enumerate(times) if at <= probe_s), default=None)
    expected = sum(r.scheduled_s <= probe_s < r.finished_s for r in records)
    assert (0 if seen is None else counts[seen]) == expected


@given(
    events=st.lists(st.tuples(st.floats(0, 5000), st.floats(0, 100)), max_size=50),
    span_s=st.floats(0.001, 1e6),
)
def test_rates_add_up_to_what_happened(events, span_s):
    edges, rates = per_second(events, span_s)
    assert len(edges) == len(rates) + 1 <= MAX_BINS + 2
    assert edges[-1] >= span_s * (1 - 1e-9)
    total = sum(rate * bin_width_s(span_s) for rate in rates)
    assert total == pytest.approx(sum(weight for _, weight in events))
