"""An HTTP server that answers what it was told to, path by path."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

Answer = int | str | dict[str, Any] | Callable[[dict[str, Any]], "Answer"]
"""A status, a text, a JSON object, or what makes one of them from the request's JSON."""


@dataclass
class PlainServer:
    """Serves on a free loopback port inside `async with`; a path it does not know is 404."""

    answers: dict[str, Answer]
    targets: list[str] = field(default_factory=list)
    """Paths with their queries, in order of arrival."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                (
                    int(line.partition(":")[2])
                    for line in head.split("\r\n")
                    if line.lower().startswith("content-length:")
                ),
                0,
            )
            body = await reader.readexactly(length)
            target = head.split()[1]
            self.targets.append(target)
            status, text = self._answer(urlsplit(target).path, body)
            data = text.encode()
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode())
            writer.write(data)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # a probe that only connects
        finally:
            writer.close()

    def _answer(self, path: str, body: bytes) -> tuple[int, str]:
        answer = self.answers.get(path, 404)
        while callable(answer):
            answer = answer(json.loads(body) if body else {})
        if isinstance(answer, int):
            return answer, "{}"
        return 200, answer if isinstance(answer, str) else json.dumps(answer)
