"""For operators and probes: /health, /ready, /live, /metrics, /version, /debug/kv.

Only the last, which is off by default, asks the engine for anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tailrace import __version__
from tailrace.errors import RequestError
from tailrace.server.engine_client import EngineState

if TYPE_CHECKING:
    from tailrace.server.http import Handler, Request
    from tailrace.server.services import Services
    from tailrace.types import EngineReady, EngineStats

METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


async def health(services: Services, request: Request) -> None:
    """GET /health: 200 while requests can be served, however busy; else 503 and why."""
    status = _status(services)
    is_healthy = status in ("ok", "draining")
    await request.send_json(200 if is_healthy else 503, _describe(services, status))


async def ready(services: Services, request: Request) -> None:
    """GET /ready: 200 once warm, and until draining or the engine's death."""
    status = _status(services)
    await request.send_json(200 if status == "ok" else 503, {"status": status})


async def live(services: Services, request: Request) -> None:
    """GET /live: 200 while the event loop turns and an engine runs or is being started."""
    failed = services.engine.state is EngineState.FAILED
    await request.send_json(503 if failed else 200, {"status": services.engine.state.value})


async def metrics(services: Services, request: Request) -> None:
    """GET /metrics: the Prometheus text format."""
    text = services.metrics.render(
        stats=services.engine.stats,
        restarts=services.engine.restarts_total,
        silence_s=services.engine.silence_s,
        pids=services.family | services.engine.pids,
        frontend_restarts=services.frontend_restarts,
        dropped_records=services.request_log.dropped_total,
    )
    await request.send_bytes(200, text, METRICS_TYPE)


async def version(services: Services, request: Request) -> None:
    """GET /version."""
    del services
    await request.send_json(200, {"version": __version__})


async def debug_kv(services: Services, request: Request) -> None:
    """GET /debug/kv: the KV pool, checked; 500 where it breaks a rule, 404 without --debug-kv."""
    if not services.config.server.debug_kv:
        raise RequestError("/debug/kv is served with --debug-kv only", status=404)
    report = await services.engine.inspect_kv()
    await request.send_json(500 if report.fault else 200, msgspec.to_builtins(report))


ROUTES: dict[tuple[str, str], Handler] = {
    ("GET", "/health"): health,
    ("GET", "/ready"): ready,
    ("GET", "/live"): live,
    ("GET", "/metrics"): metrics,
    ("GET", "/version"): version,
    ("GET", "/debug/kv"): debug_kv,
}


def _status(services: Services) -> str:
    state = services.engine.state
    if state is not EngineState.READY:
        return str(state.value)
    if services.text is None:
        return str(EngineState.STARTING.value)
    return "draining" if services.draining else "ok"


def _describe(services: Services, status: str) -> dict[str, Any]:
    stats, ready_message, rates = services.engine.stats, services.engine.ready, services.rates
    described: dict[str, Any] = {
        "status": status,
        "model": services.text.model_name if services.text else None,
        "device": ready_message.device if ready_message else None,
        "device_utilization": rates.busy_share,
        "tokens_per_second": rates.tokens_per_s,
        "running_requests": stats.running_requests if stats else 0,
        "pending_requests": stats.waiting_requests if stats else 0,
        "engine_restarts": services.engine.restarts_total,
    }
    if ready_message is not None:
        described["kv_cache"] = _kv_cache(ready_message, stats)
    if stats is not None and stats.timings is not None and stats.step_costs is not None:
        # It is healthy all the same: what goes by predictions is worse, and nothing fails.
        described["step_prediction"] = {
            "status": "off" if stats.timings.is_off else "ok",
            "recent_error": stats.timings.recent_error,
            "off_s": stats.timings.off_s,
        }
    return described


def _kv_cache(ready_message: EngineReady, stats: EngineStats | None) -> dict[str, Any]:
    """Describe the pool; an engine that is ready and has reported nothing yet holds nothing."""
    total, size = ready_message.total_blocks, ready_message.block_size
    used = total - stats.free_blocks if stats else 0
    return {"usage": used / total, "total_tokens": total * size, "used_tokens": used * size}
