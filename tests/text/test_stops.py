import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import RequestError
from tailrace.text.stops import MAX_STOP_CHARS, MAX_STOPS, StopStrings

letters = st.text(alphabet="abc", max_size=12)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def oracle(text, stops, include):
    """Return the text up to the earliest, then longest, stop string, and that string."""
    hits = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    if not hits:
        return text, None
    start, _, stop = min(hits)
    return text[: start + len(stop)] if include else text[:start], stop


@given(parts=st.lists(letters, max_size=8), stops=stop_lists, include=st.booleans())
def test_any_split_gives_what_the_whole_text_gives(parts, stops, include):
    watcher = StopStrings(stops, include_stop=include)
    said = ""
    for part in parts:
        new, hit = watcher.push(part)
        said += new
        if hit:
            break
    said += watcher.finish()
    assert (said, watcher.hit) == oracle("".join(parts), stops, include)


def oracle_after(free, text, stops):
    """Return the text up to the earliest, then longest, stop string that ends beyond `free`."""
    whole = free + text
    hits = [
        (start, -len(stop), stop)
        for stop in stops
        for start in range(len(whole))
        if whole.startswith(stop, start) and start + len(stop) > len(free)
    ]
    return (whole[: min(hits)[0]], min(hits)[2]) if hits else (whole, None)


@given(free=st.lists(letters, max_size=5), later=st.lists(letters, max_size=5), stops=stop_lists)
def test_no_stop_counts_that_ends_in_free_text_however_it_is_split(free, later, stops):
    watcher = StopStrings(stops)
    said = "".join(watcher.push(part, is_free=True)[0] for part in free)
    assert watcher.hit is None
    for part in later:
        new, hit = watcher.push(part)
        said += new
        if hit:
            break
    said += watcher.finish()
    assert (said, watcher.hit) == oracle_after("".join(free), "".join(later), stops)


@given(parts=st.lists(letters, max_size=8), stops=stop_lists)
def test_exactly_the_longest_possible_beginning_is_held_back(parts, stops):
    watcher = StopStrings(stops)
    said = seen = ""
    for part in parts:
        new, hit = watcher.push(part)
        said, seen = said + new, seen + part
        if hit:
            return
        beginnings = [s[:n] for s in stops for n in range(1, len(s)) if seen.endswith(s[:n])]
        held = max(map(len, beginnings), default=0)
        assert said == seen[: len(seen) - held]


@given(text=letters, stops=stop_lists.filter(bool))
def test_a_stop_is_acted_on_as_soon_as_no_text_to_come_can_change_it(text, stops):
    _, hit = StopStrings(stops).push(text)
    endings = [text + tail for tail in ("", *(s[n:] for s in stops for n in range(len(s))), "z")]
    outcomes = {oracle(ending, stops, False) for ending in endings}
    assert (hit is not None) == (len(outcomes) == 1 and oracle(text, stops, False)[1] is not None)


def test_without_stops_nothing_is_held():
    watcher = StopStrings([])
    assert watcher.push("any") == ("any", None)
    assert watcher.finish() == ""


def test_a_shorter_stop_waits_for_a_longer_one_and_counts_at_the_end():
    watcher = StopStrings(["ab", "abc"], include_stop=True)
    assert watcher.push("xab") == ("x", None)
    assert watcher.finish() == "ab"
    assert watcher.hit == "ab"


def test_text_after_the_stop_is_dropped():
    watcher = StopStrings(["."])
    assert watcher.push("a.b") == ("a", ".")
    assert watcher.push("c") == ("", ".")
    assert watcher.finish() == ""


@pytest.mark.parametrize(
    "stops", [[""], ["x" * (MAX_STOP_CHARS + 1)], [str(i) for i in range(MAX_STOPS + 1)]]
)
def test_stops_beyond_the_limits_are_the_clients_fault(stops):
    with pytest.raises(RequestError) as caught:
        StopStrings(stops)
    assert (caught.value.status, caught.value.param) == (400, "stop")
