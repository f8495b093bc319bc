"""Sends the requests of a run on time and stamps what comes back.

`Load` is one process, `Fleet` several that count as one client, and `loader_for` picks between
them. `Reading` turns an answer's bytes into a record, for any transport. `canary`
asks beforehand whether this client can carry a planned peak.
"""

from tailrace.bench.load.client import Heartbeat, Load
from tailrace.bench.load.fleet import Fleet, Loader, loader_for, processes_for
from tailrace.bench.load.reading import Reading
from tailrace.bench.load.shot import Shot, blank_record, new_run_id
from tailrace.bench.load.state import LoadState

__all__ = [
    "Fleet",
    "Heartbeat",
    "Load",
    "LoadState",
    "Loader",
    "Reading",
    "Shot",
    "blank_record",
    "loader_for",
    "new_run_id",
    "processes_for",
]
