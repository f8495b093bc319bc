"""What the operating system says of our processes."""

import subprocess
import sys

from tailrace.telemetry.process import resident_bytes

# A process of its own: one that has run thousands of tests has freed memory to take again.
GROWS = """
import sys
def tell():
    print("ready", flush=True)
    sys.stdin.readline()
tell()
block = bytearray(b"x") * (64 << 20)
tell()
"""


def test_a_process_is_seen_to_grow():
    with subprocess.Popen(
        [sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        before = resident_bytes(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        after = resident_bytes(child.pid)
        child.communicate(b"\n")
    assert after - before > 32 << 20


def test_a_process_that_is_gone_has_none():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert resident_bytes(child.pid) is None
