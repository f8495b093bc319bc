"""Requests before the scheduler has them: leases and early work of those still arriving, grammars.

arriving     a lease by deadline, maybe a prompt's first tokens computed   -> request, or expired
compiling    whole, but its grammar is on the compiler's thread            -> request, or refused
a request    -> a sequence, which goes on from what was computed early where that is its beginning
"""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING

import structlog

from tailrace.engine.early_prompts import POOL_SHARE
from tailrace.engine.sequence import Sequence
from tailrace.text.grammar import GrammarError
from tailrace.types import ReserveKv

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from concurrent.futures import Future

    from tailrace.clock import Clock
    from tailrace.engine.scheduler import Scheduler
    from tailrace.text.grammar import Grammar, GrammarCompiler
    from tailrace.types import EngineRequest, GrowPrompt

log = structlog.get_logger("tailrace.engine")

_COMPILE_WAIT_S = 0.002
"""An engine with nothing else to do looks so often for new requests while a grammar compiles."""


class Arrivals:
    """Who has come and is not queued.

    Args:
        scheduler: Whose pool is leased, and who computes early.
        clock: Monotonic seconds.
        queued: Ids of the requests that the scheduler has, as they are at any time.
        context_length: Most tokens of one sequence.
        vocab_size: Token ids are below this.
        grammars: Compiles them; None: requests with a grammar are refused by the engine.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock,
        queued: Collection[str],
        *,
        context_length: int,
        vocab_size: int,
        grammars: GrammarCompiler | None,
    ) -> None:
        self.grammars = grammars
        self._scheduler = scheduler
        self._clock = clock
        self._queued = queued
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._compiling: dict[str, tuple[EngineRequest, Future[Grammar]]] = {}
        self._reserved: dict[str, float] = {}
        """Deadlines of leases, and of early work, whose request has not come yet."""

    @property
    def compiling(self) -> int:
        """Complete requests whose grammar is being compiled."""
        return len(self._compiling)

    def compiling_of(self, key: str) -> int:
        """Return how many of them are one key's."""
        return sum(request.key == key for request, _ in self._compiling.values())

    def is_whole(self, request_id: str) -> bool:
        """Whether a request has come as a whole: it compiles, runs or waits."""
        return request_id in self._queued or request_id in self._compiling

    def are_ids(self, ids: list[int]) -> bool:
        """Whether there are token ids, all of them in the vocabulary."""
        return bool(ids) and 0 <= min(ids) <= max(ids) < self._vocab_size

    def reserve(self, wish: ReserveKv) -> None:
        """Lease KV for a request that is still arriving; see `Engine.reserve`."""
        self.expire()
        request_id, blocks = wish.request_id, self._scheduler.blocks
        is_known = self.is_whole(request_id) or request_id in self._reserved
        if is_known or self._scheduler.waiting:
            return
        promised = blocks.reserved_units + self._scheduler.early.units
        room = blocks.num_units // POOL_SHARE - promised
        tokens = min(wish.num_tokens, self._context_length, room * blocks.unit_tokens)
        if tokens > 0:
            blocks.reserve(request_id, tokens)
            self._reserved[request_id] = self._clock() + wish.lifetime_s

    def grow(self, piece: GrowPrompt) -> None:
        """Take a piece of a prompt that is still arriving; see `Engine.grow`."""
        early = self._scheduler.early
        request_id, ids = piece.request_id, piece.token_ids
        known = early.get(request_id)
        if self.is_whole(request_id) or not self.are_ids(ids):
            return
        if piece.start + len(ids) >= self._context_length:
            return
        if known is not None and piece.start == len(known.token_ids):
            early.extend(known, ids)
        elif known is None and piece.start == 0 and early.can_add():
            self.reserve(ReserveKv(request_id, len(ids), piece.lifetime_s))
            now = self._clock()
            self._reserved.setdefault(request_id, now + piece.lifetime_s)
            early.add(Sequence.arriving(request_id, ids, now, piece.cache_salt))

    def expire(self) -> None:
        """Give back what was leased for requests that never came."""
        if not self._reserved:
            return
        now = self._clock()
        for request_id in [i for i, deadline_s in self._reserved.items() if deadline_s <= now]:
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Give back what a request that is not complete holds and is leased, if anything."""
        if self._reserved.pop(request_id, None) is None:
            return
        early = self._scheduler.early.get(request_id)
        if early is not None:
            self._scheduler.early.drop(early)
        self._scheduler.blocks.release(request_id)

    def sequence_of(self, request: EngineRequest) -> Sequence:
        """Return a waiting sequence that goes on from what was computed early, if that is it.

        It takes the request's lease over.
        """
        self._reserved.pop(request.request_id, None)
        early = self._scheduler.early.get(request.request_id)
        if early is None:
            return Sequence.from_request(request, self._context_length)
        if not early.begins(request):
            self._scheduler.early.drop(early)
            return Sequence.from_request(request, self._context_length)
        early.complete(request, self._context_length)
        self._scheduler.early.complete(early)
        return early

    def compile(self, request: EngineRequest, grammars: GrammarCompiler) -> None:
        """Hold a request back until its grammar is compiled."""
        compiled = grammars.compile_soon(request.sampling.grammar)
        self._compiling[request.request_id] = (request, compiled)

    def cancel(self, request_id: str) -> bool:
        """Forget a request whose grammar is being compiled; return whether there was one."""
        held = self._compiling.pop(request_id, None)
        if held is None:
            return False
        held[1].cancel()  # nobody waits behind what nobody wants
        return True

    def compiled(self, *, is_idle: bool) -> Iterator[tuple[EngineRequest, Grammar | None, str]]:
        """Yield the requests whose grammar is done: with it, or with what is wrong.

        Args:
            is_idle: Whether there is nothing else to do, so that a moment may be waited.
        """
        if not self._compiling:
            return
        if is_idle:
            wait([compiled for _, compiled in self._compiling.values()], _COMPILE_WAIT_S)
        for request, compiled in list(self._compiling.values()):
            if not compiled.done():
                continue
            del self._compiling[request.request_id]
            try:
                grammar = compiled.result()
            except GrammarError as error:
                yield request, None, f"the grammar is refused: {error}"
            except Exception:  # a fault of the compiler's ends this request, and no other
                log.exception("grammar_failed")
                yield request, None, "the engine failed at this grammar"
            else:
                yield request, grammar, ""
