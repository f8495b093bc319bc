"""What the operating system says of our processes."""

import os
import subprocess
import sys

from tailrace.telemetry.process import resident_bytes


def test_our_own_memory_is_seen_to_grow():
    before = resident_bytes(os.getpid())
    block = bytearray(os.urandom(1)) * 64 * 1024 * 1024
    assert resident_bytes(os.getpid()) - before > len(block) // 2


def test_a_process_that_is_gone_has_none():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert resident_bytes(child.pid) is None
