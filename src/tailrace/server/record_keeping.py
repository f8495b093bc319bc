"""One record for each request that asked for text, whatever became of it.

A request is recorded when the kernel has its answer's last byte, or its client has gone: only then
are all its phases known. Those that were refused before the engine are recorded with the reason.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import TYPE_CHECKING

from tailrace.telemetry.request_log import RequestRecord

if TYPE_CHECKING:
    from tailrace.errors import RequestError
    from tailrace.server.generation import Generation
    from tailrace.server.http import Request
    from tailrace.server.services import Services

CLIENT_GONE = 499
"""The status of a request whose client left before its answer began, as nginx logs it."""
REFUSED = "refused"
_REASON_CHARS = 200


def keep_record(
    services: Services, request: Request, generation: Generation, delivered_s: float
) -> None:
    """Record a request that the engine had."""
    record = generation.record(
        request.request_id, status=request.status or CLIENT_GONE, delivered_s=delivered_s
    )
    record.reason = _reason(request.failure)
    if request.failure is not None and request.failure.status == HTTPStatus.TOO_MANY_REQUESTS:
        record.finish_reason = REFUSED  # by the engine, which counts for several front ends
    services.metrics.observe_request(record)
    services.request_log.write(record)


def keep_refusal(services: Services, request: Request, delivered_s: float) -> None:
    """Record a request that was refused before the engine, or whose client left before that.

    Args:
        services: Of the server.
        request: As far as it came; without a failure nobody was there to be answered.
        delivered_s: When the kernel had the answer's last byte, or the client was gone.
    """
    timeline = request.timeline
    status = request.status or CLIENT_GONE
    record = RequestRecord(
        request_id="",
        http_request_id=request.request_id,
        key=request.holder.name if request.holder is not None else "",
        route=request.path,
        unix_s=time.time(),
        received_s=timeline.received_s,
        finished_s=delivered_s,
        finish_reason=_ending(request.failure),
        status=status,
        reason=_reason(request.failure),
        phases=timeline.refused(delivered_s),
    )
    services.metrics.observe_phases(record)
    services.request_log.write(record)


def _ending(error: RequestError | None) -> str:
    """Say how a request ended that the engine never had; a failure of ours is no refusal."""
    if error is None:
        return "disconnect"
    is_ours = error.status >= 500 and error.status != HTTPStatus.SERVICE_UNAVAILABLE
    return "error" if is_ours else REFUSED


def _reason(error: RequestError | None) -> str:
    if error is None:
        return ""
    code = error.code or HTTPStatus(error.status).phrase.lower()
    return f"{code}: {error.message}"[:_REASON_CHARS]
