"""Sends a plan's requests over gevent sockets: a process of its own, so that tests stay free of it.

`python -m tests.bench.gevent_client PLAN RECORDS TIMEOUT_S [CA_FILE]`; it does what the Locust
driver does, without Locust.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tailrace.bench.locust_plan import read_plan
from tailrace.bench.locust_run import LocustRun
from tailrace.bench.locust_sse import StreamClient, client_tls
from tailrace.bench.records import write_records


def main() -> int:
    plan_file, records_file, timeout_s, *ca_file = sys.argv[1:]
    plan, shots = read_plan(Path(plan_file))
    tls = client_tls(*ca_file) if plan.is_tls else None
    endpoint = plan.endpoint("")
    client = StreamClient(endpoint, timeout_s=float(timeout_s), tls=tls)
    records = []
    run = LocustRun(endpoint, client, shots, on_record=records.append)
    run.start()
    run.dispatch()
    assert run.is_done
    assert run.state.in_flight == 0
    run.finish()
    write_records(Path(records_file), records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
