"""The ASGI application: one table of routes, and what every exchange has in common."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from tailrace.errors import RequestError, nearest
from tailrace.server import (
    routes_generate,
    routes_messages,
    routes_openai,
    routes_operations,
    routes_responses,
    routes_text,
)
from tailrace.server.auth import check_key
from tailrace.server.cors import allow_origin, answer_preflight, is_preflight
from tailrace.server.http import Request
from tailrace.server.ingest import ClientGoneError
from tailrace.server.record_keeping import keep_refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tailrace.server.http import Handler, Receive, Scope, Send
    from tailrace.server.services import Services

log = structlog.get_logger("tailrace.app")

ROUTES: dict[tuple[str, str], Handler] = {
    **routes_openai.ROUTES,
    **routes_messages.ROUTES,
    **routes_responses.ROUTES,
    **routes_generate.ROUTES,
    **routes_text.ROUTES,
    **routes_operations.ROUTES,
}
_GENERATING = frozenset(
    route
    for room in (routes_openai, routes_messages, routes_responses, routes_generate)
    for route in room.ROUTES
    if route not in (routes_messages.COUNT_ROUTE, routes_responses.COUNT_ROUTE)
)
"""Of which every request gets a record."""


def create_app(services: Services) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Return the application over these services."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"no {scope['type']} here")
        request = Request(scope, receive, send, services.config.server)
        try:
            await _answer(services, request)
        except ClientGoneError:
            log.debug("client_gone", path=request.path, request_id=request.request_id)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not request.was_left or task is None or task.uncancel():
                raise  # the server ends
            log.debug("client_gone", path=request.path, request_id=request.request_id)
        except Exception as error:  # one request's failure must not become the connection's
            failure = error if isinstance(error, RequestError) else None
            if failure is None:
                log.exception("request_failed", path=request.path, request_id=request.request_id)
                failure = RequestError("the server failed at this request", status=500)
            services.metrics.count_error(failure.status, failure.code)
            # Not itself: its traceback leads back to the request.
            request.failure = RequestError(
                failure.message, status=failure.status, code=failure.code
            )
            await _answer_error(request, failure)
            error.__traceback__ = None  # leads to the tasks that keep the error, in a circle
        finally:
            if not request.has_account and _asks_for_text(request):
                request.at_end(lambda end_s: keep_refusal(services, request, end_s))
            request.end()

    return app


def _asks_for_text(request: Request) -> bool:
    """Whether its kind goes to the engine, so that its refusal is worth a record."""
    return (request.method, request.path) in _GENERATING


async def _answer(services: Services, request: Request) -> None:
    config = services.config.server
    allow_origin(request, config.cors_origins)
    if is_preflight(request):
        await answer_preflight(request, [*_methods(request.path), "OPTIONS"])
        return
    request.holder = check_key(request, services.keys)
    await _route(request)(services, request)


async def _answer_error(request: Request, error: RequestError) -> None:
    if request.is_answered:
        request.drop()  # half an answer is out: only the connection's end can tell of a failure
    else:
        await request.send_error(error)


def _route(request: Request) -> Handler:
    method = "GET" if request.method == "HEAD" else request.method
    handler = _handlers(request.path).get(method)
    if handler is not None:
        return handler
    methods = _methods(request.path)
    if methods:
        request.add_header(b"allow", ", ".join(methods).encode())
        raise RequestError(f"{request.path} takes {', '.join(methods)}", status=405)
    shown = request.path[:200]
    hint = nearest(request.path, {path for _, path in ROUTES})
    raise RequestError(f"there is nothing at {shown}{hint}", status=404)


def _handlers(path: str) -> dict[str, Handler]:
    """Return what serves a path, by method; one path is a family: /v1/models/NAME."""
    if path.startswith(routes_text.MODEL_PATH) and path != routes_text.MODEL_PATH:
        return routes_text.MODEL_ROUTES
    return {method: handler for (method, known), handler in ROUTES.items() if known == path}


def _methods(path: str) -> list[str]:
    methods = set(_handlers(path))
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)
