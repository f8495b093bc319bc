"""The request log: every record, or a count of what was dropped; never a failure."""

import io
import json
import threading

import msgspec
import pytest

from tailrace.telemetry import request_log
from tailrace.telemetry.request_log import LogMark, RequestLog, RequestRecord, rotated


def record(request_id="r", **fields):
    known = {"route": "/generate", "unix_s": 1.0, "received_s": 2.0, "finished_s": 3.0}
    return RequestRecord(request_id=request_id, **known | fields)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_arrive_in_order_and_whole(tmp_path):
    path = tmp_path / "requests.jsonl"
    log = RequestLog(str(path))
    for number in range(500):
        log.write(record(f"r{number}", prompt_tokens=number, finish_reason="stop"))
    log.close()
    assert [line["request_id"] for line in lines(path)] == [f"r{n}" for n in range(500)]
    assert lines(path)[7] == msgspec.to_builtins(
        record("r7", prompt_tokens=7, finish_reason="stop")
    )
    assert log.dropped_total == 0


def test_a_file_that_exists_is_appended_to(tmp_path):
    path = tmp_path / "requests.jsonl"
    for name in ("a", "b"):
        log = RequestLog(str(path))
        log.write(record(name))
        log.close()
    assert [line["request_id"] for line in lines(path)] == ["a", "b"]


def test_without_a_path_nothing_is_kept_and_no_thread_runs():
    before = set(threading.enumerate())
    log = RequestLog("")
    log.write(record())
    assert set(threading.enumerate()) <= before
    log.close()
    assert log.dropped_total == 0


def test_a_path_that_cannot_be_opened_costs_only_the_records(tmp_path):
    log = RequestLog(str(tmp_path / "missing" / "requests.jsonl"))
    log.write(record())
    log.write(record())
    log.close()
    assert log.dropped_total == 2


def test_a_folder_that_comes_back_is_written_to_again(tmp_path):
    path = tmp_path / "later" / "requests.jsonl"
    log = RequestLog(str(path))
    log.write(record("lost"))
    while log.dropped_total == 0:  # the writer's thread is at it
        assert log._thread.is_alive()
    path.parent.mkdir()
    log.write(record("kept"))
    log.close()
    assert [line["request_id"] for line in lines(path)] == ["kept"]


def test_a_full_device_costs_only_the_records():
    log = RequestLog("/dev/full")
    log.write(record())
    log.write(record())
    log.close()
    assert log.dropped_total == 2


class NearlyFullFile(io.RawIOBase):
    """Takes the first bytes of the second line only, as a disk that is just full."""

    def __init__(self):
        self.content = b""
        self.writes = 0

    def write(self, data):
        self.writes += 1
        taken = data[:9] if self.writes == 2 else data
        self.content += taken
        return len(taken)

    def close(self):
        """Keep the content for the test."""


def test_half_a_line_does_not_spoil_the_next():
    log = RequestLog("")
    file = NearlyFullFile()
    log._path = "x"
    log._open = lambda: file
    for name in ("a", "torn", "c", "d"):
        log._records.put(record(name))
    log._records.put(None)
    log._run()
    whole, torn, *later = file.content.splitlines()
    assert json.loads(whole)["request_id"] == "a"
    with pytest.raises(ValueError):
        json.loads(torn)
    assert [json.loads(line)["request_id"] for line in later] == ["c", "d"]
    assert log.dropped_total == 1


def test_a_burst_beyond_the_queue_is_dropped_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(request_log, "_QUEUE_RECORDS", 3)
    path = tmp_path / "requests.jsonl"
    log = RequestLog(str(path))
    may_open = threading.Event()
    is_opening = threading.Event()
    really_open = log._open

    def slow_open():
        is_opening.set()
        may_open.wait(120)
        return really_open()

    log._open = slow_open
    log.write(record("first"))
    assert is_opening.wait(120)
    for number in range(5):
        log.write(record(f"r{number}"))
    assert log.dropped_total == 2
    may_open.set()
    log.close()
    assert [line["request_id"] for line in lines(path)] == ["first", "r0", "r1", "r2"]


def test_a_record_that_cannot_be_encoded_costs_only_itself(tmp_path):
    path = tmp_path / "requests.jsonl"
    log = RequestLog(str(path))
    for reason in ("a", "half a character: \ud800", "b"):
        log.write(record(reason=reason))
    log.close()
    assert [line["reason"] for line in lines(path)] == ["a", "b"]
    assert log.dropped_total == 1


@pytest.mark.parametrize("waiting", [1, 3], ids=["room for the end", "a full queue"])
def test_a_file_that_takes_nothing_does_not_hold_up_the_end(monkeypatch, tmp_path, waiting):
    monkeypatch.setattr(request_log, "_QUEUE_RECORDS", 3)
    monkeypatch.setattr(request_log, "_CLOSE_S", 0.05)
    log = RequestLog(str(tmp_path / "requests.jsonl"))
    may_open, is_opening = threading.Event(), threading.Event()
    really_open = log._open

    def slow_open():
        is_opening.set()
        may_open.wait(60)
        return really_open()

    log._open = slow_open
    log.write(record("first"))
    assert is_opening.wait(120)
    for number in range(waiting):
        log.write(record(f"r{number}"))
    closing = threading.Thread(target=log.close, daemon=True)
    closing.start()
    closing.join(120)
    is_closed = not closing.is_alive()
    may_open.set()
    assert is_closed


def test_writing_after_the_close_is_harmless(tmp_path):
    log = RequestLog(str(tmp_path / "requests.jsonl"))
    log.close()
    log.write(record())
    log.close()


def written(path, names, **options):
    log = RequestLog(str(path), **options)
    for name in names:
        log.write(record(name))
    log.close()
    assert log.dropped_total == 0


def ids(path):
    return [line["request_id"] for line in lines(path)]


LINE_BYTES = len(msgspec.json.encode(record("r0"))) + 1


def test_a_full_file_is_rotated_and_only_so_many_are_kept(tmp_path):
    path = tmp_path / "requests.jsonl"
    written(path, [f"r{n}" for n in range(9)], max_bytes=2 * LINE_BYTES, files=2)
    assert [file.name for file in rotated(path)] == [
        "requests.jsonl.2",
        "requests.jsonl.1",
        "requests.jsonl",
    ]
    assert [ids(file) for file in rotated(path)] == [["r4", "r5"], ["r6", "r7"], ["r8"]]
    assert all(file.stat().st_size <= 2 * LINE_BYTES for file in rotated(path))


def test_a_file_of_an_earlier_run_counts_to_the_size(tmp_path):
    path = tmp_path / "requests.jsonl"
    written(path, ["r0", "r1"], max_bytes=3 * LINE_BYTES)
    written(path, ["r2", "r3"], max_bytes=3 * LINE_BYTES)
    assert [ids(file) for file in rotated(path)] == [["r0", "r1", "r2"], ["r3"]]


def test_a_line_longer_than_the_size_has_a_file_of_its_own(tmp_path):
    path = tmp_path / "requests.jsonl"
    written(path, ["r0", "r1"], max_bytes=10)
    assert [ids(file) for file in rotated(path)] == [["r0"], ["r1"]]


def test_where_none_is_kept_a_full_file_begins_anew(tmp_path):
    path = tmp_path / "requests.jsonl"
    written(path, ["r0", "r1", "r2"], max_bytes=2 * LINE_BYTES, files=0)
    assert [ids(file) for file in rotated(path)] == [["r2"]]


def test_two_writers_of_one_log_rotate_once_and_lose_nothing(tmp_path):
    path = tmp_path / "requests.jsonl"
    logs = [RequestLog(str(path), max_bytes=5 * LINE_BYTES, files=20) for _ in range(2)]
    for number in range(40):
        logs[number % 2].write(record(f"r{number}"))
    for log in logs:
        log.close()
    found = [name for file in rotated(path) for name in ids(file)]
    assert sorted(found) == sorted(f"r{n}" for n in range(40))
    assert all(len(ids(file)) >= 4 for file in rotated(path)[:-1])
    assert sum(log.dropped_total for log in logs) == 0


def test_a_device_is_never_rotated():
    log = RequestLog("/dev/full", max_bytes=1, files=1)
    log.write(record())
    log.close()
    assert log.dropped_total == 1


def test_a_rotation_that_fails_costs_only_records(tmp_path, monkeypatch):
    path = tmp_path / "requests.jsonl"

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(request_log, "_rotate", fails)
    log = RequestLog(str(path), max_bytes=LINE_BYTES, files=1)
    for name in ("r0", "r1", "r2"):
        log.write(record(name))
    log.close()
    assert log.dropped_total == 2
    assert ids(path) == ["r0"]


def test_other_files_of_the_folder_are_no_part_of_a_log(tmp_path):
    path = tmp_path / "a.jsonl"
    for name in ("a.jsonl.1", "a.jsonl.10", "a.jsonl.2", "a.jsonl.bak", "aXjsonl.1", "b.jsonl"):
        (tmp_path / name).touch()
    assert [file.name for file in rotated(path)] == ["a.jsonl.10", "a.jsonl.2", "a.jsonl.1"]
    assert rotated(tmp_path / "missing" / "a.jsonl") == []


@pytest.mark.parametrize("files", [1, 9])
@pytest.mark.parametrize("before", [0, 1, 3, 7])
def test_what_is_written_after_a_mark_is_found_whatever_is_rotated(tmp_path, before, files):
    path = tmp_path / "requests.jsonl"
    log = RequestLog(str(path), max_bytes=3 * LINE_BYTES, files=files)
    names = [f"r{n}" for n in range(before)]
    for name in names:
        log.write(record(name))
    log.close()
    mark = LogMark(path)
    assert mark.written_since() == b""
    written(path, [f"s{n}" for n in range(6)], max_bytes=3 * LINE_BYTES, files=files)
    found = [json.loads(line)["request_id"] for line in mark.written_since().splitlines()]
    wanted = [f"s{n}" for n in range(6)]
    assert found == wanted[len(wanted) - len(found) :]
    assert files == 1 or found == wanted  # with one file beside, the oldest are deleted by now
    assert len(found) >= 4
