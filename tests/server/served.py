"""`tailrace serve` as a process, with all that descends from it."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import httpx

DEADLINE_S = 120.0
"""After so long a test has failed, were the machine ever so busy."""
CONTEXT_TOKENS = 50_000
"""Room for requests that do not end while a test is at work."""


class Served:
    """A server process and all that descend from it, known by a mark in their environment."""

    def __init__(self, folder, *options):
        self.mark = uuid.uuid4().hex
        self.folder = folder
        command = [sys.executable, "-m", "tailrace", "serve", "--port", "0", *options]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TEST_MARK": self.mark, "TMPDIR": folder, "NO_COLOR": "1"},
            start_new_session=True,
        )
        self.lines = []
        self._new_lines = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self._new_lines.put(line.rstrip("\n"))
        self._new_lines.put(None)

    def line(self, pattern):
        """Wait for a line of standard error; return the match."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            line = self._new_lines.get(timeout=deadline_s - time.monotonic())
            assert line is not None, f"ended without {pattern!r}: {self.lines}"
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found

    def ready(self):
        """Wait for the line that says so; return a client."""
        url = self.line(r"\] ready .*url=(\S+)")[1]
        return httpx.Client(base_url=url, timeout=DEADLINE_S)

    def ended(self):
        """Wait for the end; return the exit status and what was not yet read."""
        status = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        rest = []
        while (line := self._new_lines.get(timeout=DEADLINE_S)) is not None:
            rest.append(line)
        return status, rest

    def signal_group(self, number):
        """Send a signal to all processes at once, as `kill -- -PGID` and systemd do."""
        os.killpg(self.process.pid, number)

    def family(self):
        """Return the process ids that carry the mark."""
        found = set()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and self.mark in (entry / "environ").read_text(
                    encoding="utf-8", errors="replace"
                ):
                    found.add(int(entry.name))
        return found

    def engine_pid(self):
        (pid,) = self.family() - {self.process.pid}
        return pid

    def wait_for_end_of_family(self):
        deadline_s = time.monotonic() + DEADLINE_S
        while self.family():
            assert time.monotonic() < deadline_s, f"left behind: {self.family()}"
            time.sleep(0.01)

    def assert_nothing_left(self):
        assert self.family() == set()
        assert list(Path(self.folder).glob("tailrace-*")) == []


@contextlib.contextmanager
def streaming(client, max_tokens, key=None):
    """Begin a stream; give its events once the first has come."""
    body = {
        "prompt": "Hi",
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with client.stream("POST", "/generate", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        lines = (line for line in answer.iter_lines() if line)
        yield [next(lines)], lines


def status_of(client, path):
    return client.get(path).status_code
