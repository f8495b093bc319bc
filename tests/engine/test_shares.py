"""Fair shares: keys converge on theirs, and nobody overtakes within a key."""

import heapq

from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.engine.shares import Shares


def serve(shares, queued, rounds, cost_of):
    """Serve whoever starts first; return the tokens that each key got."""
    served = {}
    for _ in range(rounds):
        start, _, key = heapq.heappop(queued)
        shares.begin(0, start)
        served[key] = served.get(key, 0) + cost_of(key)
        yield key, served


def test_a_single_request_goes_before_all_but_the_next_of_a_flood():
    shares = Shares()
    flood = [shares.enter(0, "flood", 1.0, 100) for _ in range(50)]
    shares.begin(0, flood[0])
    single = shares.enter(0, "single", 1.0, 100)
    assert flood[0] == single < flood[1]


def test_after_a_flood_was_served_a_newcomer_is_not_owed_the_past():
    shares = Shares()
    flood = [shares.enter(0, "flood", 1.0, 100) for _ in range(50)]
    for start in flood[:40]:
        shares.begin(0, start)
    late = [shares.enter(0, "late", 1.0, 100) for _ in range(3)]
    assert late[0] == flood[39]
    assert flood[40] <= late[1] <= flood[41]


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=4),
    costs=st.lists(st.integers(1, 500), min_size=4, max_size=4),
)
def test_backlogged_keys_are_served_in_proportion_to_their_shares(weights, costs):
    shares = Shares()
    keys = [f"k{i}" for i in range(len(weights))]
    queued, number = [], 0
    for key, weight, cost in zip(keys, weights, costs, strict=False):
        for _ in range(400):
            queued.append((shares.enter(0, key, weight, cost), number, key))
            number += 1
    heapq.heapify(queued)
    cost = dict(zip(keys, costs, strict=False))
    weight = dict(zip(keys, weights, strict=True))
    # In start-time fair queueing two backlogged flows differ by at most one request of each.
    for _, served in serve(shares, queued, 150, cost.get):
        for a in keys:
            for b in keys:
                gap = served.get(a, 0) / weight[a] - served.get(b, 0) / weight[b]
                assert gap <= cost[a] / weight[a] + cost[b] / weight[b] + 1e-6


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "begin", "leave"]),
            st.sampled_from("ab"),
            st.integers(1, 300),
        ),
        max_size=60,
    )
)
def test_nobody_overtakes_within_a_key_whatever_sequences_really_cost(events):
    shares, entered, inside = Shares(), {"a": [], "b": []}, []
    for event, key, tokens in events:
        if event == "enter":
            start = shares.enter(0, key, 1.0, tokens)
            assert not entered[key] or start >= entered[key][-1]
            entered[key].append(start)
            inside.append((key, start, tokens))
        elif inside and event == "begin":
            shares.begin(0, min(start for _, start, _ in inside))
        elif inside:
            # The level is forgotten with its last member, and counts anew.
            gone, _, expected = inside.pop(0)
            shares.leave(0, gone, 1.0, tokens - expected)
            if not inside:
                entered = {"a": [], "b": []}
        assert shares.members == len(inside)


def test_what_a_sequence_really_cost_moves_the_next_of_its_key():
    shares = Shares()
    shares.enter(0, "k", 2.0, 100)
    shares.enter(0, "other", 1.0, 1)
    shares.leave(0, "k", 2.0, 40)
    assert shares.enter(0, "k", 2.0, 10) == (100 + 40) / 2
    shares.leave(0, "k", 2.0, -10)  # never ran: as if it had not come
    assert shares.enter(0, "k", 2.0, 10) == 70.0
