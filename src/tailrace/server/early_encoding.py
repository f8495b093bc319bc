"""Prompts tokenised while their bodies arrive; the body as parsed has the last word.

    body bytes --GrowingJson--> text --thread--> incremental encoder --> ids so far
    body whole, parsed, checked --> the prompt --> begins with that text? --> ids so far + the rest
                                                   has it further on?     --> with what is ahead too
                                                   otherwise              --> encoded as a whole

So the early ids can only save time: whatever came late, twice, or was not what it seemed (another
`prompt`, tools, another template), the answer is that of the body as a whole. What is encoded early
is bounded by the context, and nothing is before a body has proved to come in parts.

For a chat the early text is what the template writes up to the end of the newest message's text,
found by rendering the messages so far (`ChatTemplate.beginning`). That is repeated only where half
as much text again has come, so that the work stays linear.

KV is leased for the first tokens, and where the prompt's beginning is certain the engine is offered
the ids as they come, to compute them early (engine/early_prompts.py). The request's first sequence
takes that over, if its ids begin so; a body that ends otherwise, or not in time, gives it back.
"Certain" means: of what has come, nothing says otherwise, and for a chat, the template is steady
after such a message (text/steady_template.py), and no field that is written ahead of the messages
(Anthropic's `system`, `instructions` of responses) may still come: only bodies with that field
first are computed early. What comes later and says otherwise costs only the work done: the engine
compares the whole request with it.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from tailrace.errors import RequestError
from tailrace.server.admission import check_model, check_open
from tailrace.server.generation import sequence_id
from tailrace.server.growing_json import GrowingJson
from tailrace.server.prompts import INLINE_CHARS, off_loop_if
from tailrace.text.incremental import Span, joined
from tailrace.text.joint import joint_of, rest_of
from tailrace.text.steady_template import steady_roles
from tailrace.text.tokenizer import MAX_TEXT_CHARS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tailrace.server.growing_json import Piece, Place
    from tailrace.server.services import Services
    from tailrace.text.chat import ChatTemplate
    from tailrace.text.incremental import IncrementalSpans
    from tailrace.text.tokenizer import Tokenizer

_T = TypeVar("_T")

MIN_BYTES = 512
"""Of a body, that are looked at together: many small chunks cost no more than a large one."""
MIN_CHARS = 1024
"""About a millisecond's work: less is not worth a thread's start."""
MAX_CHARS = 32 * 1024
"""Encoded in one go: a thread for which nobody waits any more ends within some 40 ms."""

LEASE_TOKENS = 512
"""Encoded early, for which KV is leased: less is found whenever it is needed."""


_BARS_PREFILL = frozenset(
    {"add_special_tokens", "cache_salt", "echo", "prompt_logprobs", "truncate_prompt_tokens"}
)
"""Fields that may change the prompt's ids, or who may share its KV: where one has come already, the
engine is not offered what it would have to drop."""
_MODEL = ("model",)
_MAX_MODEL_CHARS = 1024


class EarlyEncoding(Generic[_T]):
    """The early encoding of one body; at the end of the `with` block no work is left.

    Args:
        services: Of the server; one that would refuse the request now encodes nothing early.
        source: What to look for, and what to do with it.
        kind: What the request's id begins with.
        cache_scope: The request's; see `Services.cache_scope`.
    """

    def __init__(
        self, services: Services, source: _Source[_T], kind: str, cache_scope: str = ""
    ) -> None:
        self.job_id = f"{kind}{uuid.uuid4().hex}"
        """The request's, if it comes to that: its first sequence takes the lease over."""
        self._services = services
        self._source = source
        self._cache_scope = cache_scope
        self._is_leased = False
        self._offered = 0
        """Ids that the engine was offered."""
        self._json = GrowingJson(lambda place: place == _MODEL or source.wants(place))
        self._model = ""
        self._seen_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._is_on = source.is_possible and _has_room(services)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
        self._give_up()

    def see(self, body: bytearray) -> None:
        """Look at a body of which more is to come; returns at once."""
        if not self._is_on or len(body) - self._seen_bytes < MIN_BYTES:
            return
        pieces = self._json.feed(bytes(memoryview(body)[self._seen_bytes :]))
        self._seen_bytes = len(body)
        if not all(map(self._note, pieces)) or self._is_contradicted():
            self._give_up()
        elif self._is_leased and not self._source.is_settled(self._json.keys):
            self._return_lease()
        elif not self._source.hopeless_with.isdisjoint(self._json.keys):
            self._is_on = False
        elif self._task is None and self._source.is_worth_it():
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def take(self, whole: _T) -> list[int] | None:
        """Return the ids of what the body held; None: encode it, nothing of it is here.

        Call it once. Begins no more work but the rest's.
        """
        self._is_on = False
        if self._task is not None:
            await self._task
        ids = await self._source.take(whole)
        self._source.forget()  # an answer may take minutes
        return ids

    def _note(self, piece: Piece) -> bool:
        if piece.place != _MODEL:
            return self._source.note(piece)
        self._model += piece.text
        text = self._services.text
        if len(self._model) > _MAX_MODEL_CHARS or text is None:
            return False
        try:
            check_model(self._model if piece.is_last else None, text)
        except RequestError:
            return False
        return True

    def _is_contradicted(self) -> bool:
        """Whether a second prompt has come, of whatever type: it counts, or the request is none."""
        rivals, json = self._source.rivals, self._json
        return len(rivals & json.keys) > 1 or not rivals.isdisjoint(json.repeated)

    async def _work(self) -> None:
        while self._is_on and self._source.is_worth_it():
            try:
                goes_on = await self._source.step()
            except RequestError:  # the whole body will say so, and what was done is half done
                self._give_up()
                break
            if self._source.is_too_long:
                self._give_up()
            self._tell_engine()
            self._is_on = self._is_on and goes_on
        self._task = None

    def _tell_engine(self) -> None:
        """Have the engine keep KV for what was encoded, and fill it, once that is worth it."""
        source, engine = self._source, self._services.engine
        if not self._is_on or source.tokens < LEASE_TOKENS:
            return
        if not source.is_settled(self._json.keys):
            return
        name, server = sequence_id(self.job_id, 0), self._services.config.server
        if not self._is_leased:
            self._is_leased = True
            engine.reserve(name, source.tokens, server.body_timeout_s)
        may_compute = server.early_prefill and _BARS_PREFILL.isdisjoint(self._json.keys)
        ids = source.certain_ids(self._offered) if may_compute else []
        if ids:
            engine.grow(name, self._offered, ids, server.body_timeout_s, self._cache_scope)
            self._offered += len(ids)

    def _give_up(self) -> None:
        """Begin nothing more, and let go of texts, ids, and what the engine holds."""
        self._is_on = False
        self._source.forget()
        self._return_lease()

    def _return_lease(self) -> None:
        if self._is_leased:
            self._is_leased = False
            self._services.engine.abort([sequence_id(self.job_id, 0)])


class _Source(ABC, Generic[_T]):
    """Text that waits to be encoded, and the ids so far."""

    is_possible: bool
    """Whether anything can be encoded early."""
    tokens: int = 0
    """Encoded so far."""
    hopeless_with: frozenset[str] = frozenset()
    """Fields that change the prompt's beginning: where one has come, there is no use in going on.

    One that comes later costs no more than the work done so far.
    """

    is_too_long: bool = False
    """Whether what has come fills the context: no request with all of it will be served."""
    rivals: frozenset[str] = frozenset()
    """Fields of which one, once, makes a request: a second one ends what was begun."""

    @abstractmethod
    def is_settled(self, keys: set[str]) -> bool:
        """Say whether, with those fields of the body begun, nothing is awaited ahead of the ids.

        Until then they are kept here, and the engine is told nothing.
        """

    @abstractmethod
    def certain_ids(self, start: int) -> list[int]:
        """Return the prompt's ids from `start` on, as far as nothing is likely to change them."""

    @abstractmethod
    def wants(self, place: Place) -> bool:
        """Say whether the string at a place of the body is of interest."""

    @abstractmethod
    def note(self, piece: Piece) -> bool:
        """Take more of such a string; return False where there is no use in going on."""

    @abstractmethod
    def is_worth_it(self) -> bool:
        """Say whether enough is waiting."""

    @abstractmethod
    async def step(self) -> bool:
        """Encode some of what is waiting; return False where there is no use in going on.

        Raises:
            RequestError: Nor is there.
        """

    @abstractmethod
    async def take(self, whole: _T) -> list[int] | None:
        """See `EarlyEncoding`; whatever `step` did is done."""

    @abstractmethod
    def forget(self) -> None:
        """Let go of texts and ids."""


class EarlyPrompt(_Source[str]):
    """A text under one of some names at the top of the body.

    Args:
        services: Of the server.
        names: The fields' names; the first that comes counts.
    """

    def __init__(self, services: Services, names: frozenset[str]) -> None:
        self._names = names
        self.rivals = names | {"input_ids"}
        self._tokenizer = services.text.tokenizer if services.text else None
        self._encoder = self._tokenizer.incremental() if self._tokenizer else None
        self._context_length = _context_length(services)
        self._fewest = 0
        self._has_begun = False
        self._waiting: list[str] = []
        self._waiting_chars = 0
        self._fed: list[str] = []
        self._ids: list[int] = []
        self.is_possible = self._encoder is not None and services.config.server.parse_special

    def is_settled(self, keys: set[str]) -> bool:
        """See `_Source`: a text has nothing ahead of it but what the tokenizer writes."""
        return not keys.isdisjoint(self._names)

    def certain_ids(self, start: int) -> list[int]:
        """See `_Source`."""
        if self._tokenizer is None:
            return []
        leading = self._tokenizer.leading_ids
        return [*leading[start:], *self._ids[max(0, start - len(leading)) :]]

    def wants(self, place: Place) -> bool:
        """See `_Source`."""
        return len(place) == 1 and place[0] in self._names

    def note(self, piece: Piece) -> bool:
        """See `_Source`."""
        if piece.is_first and self._has_begun:
            return False
        self._has_begun = True
        self._waiting.append(piece.text)
        self._waiting_chars += len(piece.text)
        return True

    def is_worth_it(self) -> bool:
        """See `_Source`."""
        return self._waiting_chars >= MIN_CHARS

    async def step(self) -> bool:
        """See `_Source`."""
        encoder, tokenizer = self._encoder, self._tokenizer
        if encoder is None or tokenizer is None:
            return False
        waiting = "".join(self._waiting)
        text, rest = waiting[:MAX_CHARS], waiting[MAX_CHARS:]
        self._waiting, self._waiting_chars = [rest], len(rest)
        self._ids += await asyncio.to_thread(encoder.feed, text)
        self.tokens = len(self._ids)
        self._fed.append(text)
        # What is held back has tokens too: without cuts there is nothing else to count.
        self._fewest += tokenizer.fewest_tokens(text)
        self.is_too_long = max(self.tokens, self._fewest) >= self._context_length
        return not self.is_too_long

    async def take(self, whole: str) -> list[int] | None:
        """See `_Source`; the ids lack what goes around a text."""
        fed = "".join(self._fed)
        encoder = self._encoder
        if encoder is None or not fed or not whole.startswith(fed) or len(whole) > MAX_TEXT_CHARS:
            return None
        rest = whole[len(fed) :]
        ids = await off_loop_if(
            len(rest) > INLINE_CHARS, lambda: encoder.feed(rest) + encoder.finish()
        )
        return self._ids + ids

    def forget(self) -> None:
        """See `_Source`."""
        self._encoder, self.is_possible = None, False
        self._waiting, self._fed, self._ids = [], [], []


@dataclass(frozen=True)
class ChatPlaces:
    """Where a dialect's bodies hold a chat.

    A system's text that is a list of parts ahead of the messages ends early work. One that comes
    after them is encoded with the rest, and what was encoded of them is still of use.
    """

    messages: str = "messages"
    """The field at the top of the body that lists them."""
    may_be_text: bool = False
    """Whether that field may be a text instead, which is what the user says."""
    system: str = ""
    """The field whose text is a message ahead of all others; "": there is none."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """What the template calls those roles that the dialect calls otherwise."""


class EarlyChat(_Source[list[Span]]):
    """The messages of a chat whose contents are texts, or lists of text parts.

    Args:
        services: Of the server.
        places: Where they are.
    """

    hopeless_with = frozenset({"tools", "chat_template_kwargs"})

    def __init__(self, services: Services, places: ChatPlaces) -> None:
        text = services.text
        self._places = places
        self.rivals = frozenset({places.messages})
        self._has_system = False
        self._is_system_late = False
        self._tokenizer: Tokenizer | None = text.tokenizer if text else None
        self._template: ChatTemplate | None = text.chat_template if text else None
        self._encoder: IncrementalSpans | None = (
            text.tokenizer.incremental_spans() if text else None
        )
        self._context_length = _context_length(services)
        self._fewest = 0
        self._messages: list[dict[str, list[str]]] = []
        self._parts = 0
        """Of the newest message's content, begun so far; a text is one."""
        self._chars = 0
        self._waiting_chars = 0
        # What was encoded, the end of which is text of message `_fed_index`; what has come of it
        # since waits in `_tail`.
        self._fed: list[Span] = []
        self._fed_index = -1
        self._tail: list[str] = []
        self._ids: list[int] = []
        self._is_steady = False
        self._certain = 0
        self.is_possible = (
            self._encoder is not None and text is not None and text.chat_template.exists
        )

    def wants(self, place: Place) -> bool:
        """See `_Source`."""
        if self._is_of_system(place):
            return True
        if place[0] != self._places.messages:
            return False
        if len(place) == 1:
            return self._places.may_be_text
        if len(place) not in (3, 5) or not isinstance(place[1], int):  # an object's key is no index
            return False
        if len(place) == 3:
            return place[2] in ("role", "content")
        return place[2] == "content" and isinstance(place[3], int) and place[4] == "text"

    def is_settled(self, keys: set[str]) -> bool:
        """See `_Source`: a system's text may yet come ahead of the messages."""
        system = self._places.system
        return not self._is_system_late and (not system or system in keys)

    def certain_ids(self, start: int) -> list[int]:
        """See `_Source`."""
        return self._ids[start : self._certain]

    def note(self, piece: Piece) -> bool:
        """See `_Source`."""
        place = piece.place
        if self._is_of_system(place):
            return self._notes_system(piece)
        if self._is_system_late:  # messages once more
            return False
        if len(place) == 1:
            index, key = int(self._has_system), "content"
            if piece.is_first and index == len(self._messages):
                self._open("user")
        else:
            index, key = int(place[1]) + self._has_system, str(place[2])
            if index == len(self._messages):
                self._open()
        if index != len(self._messages) - 1:
            return False
        part = int(place[3]) if len(place) == 5 else 0
        if piece.is_first and not self._is_next(key, part):
            return False
        # As `read_messages` joins them.
        self._keep(index, key, "\n" + piece.text if part and piece.is_first else piece.text)
        return True

    def _open(self, role: str | None = None) -> None:
        """Begin a message."""
        self._messages.append({} if role is None else {"role": [role]})
        self._parts = 0

    def _is_next(self, key: str, part: int) -> bool:
        """Count a string of the newest message; return whether it follows on what there is.

        A part that is no text leaves a gap, and a second text of anything is none that counts.
        """
        message = self._messages[-1]
        if part == 0 and key in message:
            return False
        if key == "content":
            self._parts += 1
            return part == self._parts - 1
        return True

    def _keep(self, index: int, key: str, text: str) -> None:
        self._messages[-1].setdefault(key, []).append(text)
        if key == "content":
            self._chars += len(text)
            self._waiting_chars += len(text)
            if index == self._fed_index:
                self._tail.append(text)

    def _is_of_system(self, place: Place) -> bool:
        return bool(self._places.system) and place[0] == self._places.system

    def _notes_system(self, piece: Piece) -> bool:
        """Take more of the system's message, or see that it comes too late to be the first."""
        if self._is_system_late or (self._messages and not self._has_system):
            self._is_system_late = True
            return True
        if len(piece.place) > 1 or piece.is_first == self._has_system:
            return False
        if piece.is_first:
            self._has_system = True
            self._open("system")
        self._keep(0, "content", piece.text)
        if piece.is_last and not any(self._messages[0]["content"]):
            self._has_system = False  # no dialect makes a message of it
            self._messages.clear()
        return True

    def is_worth_it(self) -> bool:
        """See `_Source`."""
        if not self._messages or self._messages[-1].keys() != {"role", "content"}:
            return False
        if self._fed_index == len(self._messages) - 1:
            return self._waiting_chars >= MIN_CHARS
        return self._waiting_chars >= max(MIN_CHARS, (self._chars - self._waiting_chars) // 2)

    async def step(self) -> bool:
        """See `_Source`."""
        self._waiting_chars = 0
        if self._fed_index == len(self._messages) - 1:
            return await self._go_on()
        return await self._begin()

    async def take(self, whole: list[Span]) -> list[int] | None:
        """See `_Source`."""
        encoder, tokenizer = self._encoder, self._tokenizer
        if not self._fed or encoder is None or tokenizer is None or _size(whole) > MAX_TEXT_CHARS:
            return None
        whole, fed = joined(whole), joined(self._fed)
        rest = rest_of(whole, fed)
        if rest is not None:
            ids = await off_loop_if(
                _size(rest) > INLINE_CHARS, lambda: _feed(encoder, rest) + encoder.finish()
            )
            return self._ids + ids
        joint = joint_of(whole, fed, encoder)
        if joint is None:
            return None

        def encode() -> list[int]:
            unused = len(tokenizer.encode_spans(joint.skipped))
            begun = tokenizer.encode_spans(joint.ahead) + self._ids[unused:]
            return begun + _feed(encoder, joint.rest) + encoder.finish()

        return await off_loop_if(_size(joint.ahead) + _size(joint.rest) > INLINE_CHARS, encode)

    def forget(self) -> None:
        """See `_Source`."""
        self._encoder, self.is_possible = None, False
        self._messages, self._fed, self._tail, self._ids = [], [], [], []

    async def _begin(self) -> bool:
        """Encode up to the end of the newest message's text so far."""
        messages = [{key: "".join(parts) for key, parts in m.items()} for m in self._messages]
        for message in messages:
            if "role" in message:
                message["role"] = self._places.roles.get(message["role"], message["role"])
        content = messages[-1]["content"]
        core = content.rstrip()
        if not core:
            return len(content) <= MAX_CHARS
        self._tail = [content[len(core) :]]
        self._fed_index = len(messages) - 1  # before others may note what follows
        template = self._template
        if template is None:
            return False
        spans = await asyncio.to_thread(template.beginning, messages)
        rest = None if spans is None else rest_of(spans, joined(self._fed))
        self._is_steady = messages[-1]["role"] in await asyncio.to_thread(steady_roles, template)
        return rest is not None and await self._encode(rest)

    async def _go_on(self) -> bool:
        """Encode more of the message that was begun."""
        text = "".join(self._tail)
        # Outer white space is the template's to keep or to trim: see `beginning`.
        core = text.rstrip()[:MAX_CHARS]
        self._tail = [text[len(core) :]]
        self._waiting_chars = len(text.rstrip()) - len(core)
        if not core:
            return len(text) <= MAX_CHARS
        return await self._encode([Span(core, is_trusted=False)])

    async def _encode(self, spans: list[Span]) -> bool:
        for part in _parts(spans):
            encoder, tokenizer = self._encoder, self._tokenizer
            if encoder is None or tokenizer is None:  # forgotten meanwhile
                return False
            self._fewest += sum(tokenizer.fewest_tokens(span.text) for span in part)
            self.is_too_long = max(self.tokens, self._fewest) >= self._context_length
            if self.is_too_long:
                return False
            self._ids += await asyncio.to_thread(_feed, encoder, part)
            self.tokens = len(self._ids)
            self._fed += part
        if self._is_steady:
            self._certain = self.tokens
        self.is_too_long = self.tokens >= self._context_length
        return not self.is_too_long


def _parts(spans: list[Span]) -> Iterator[list[Span]]:
    """Yield spans in parts of about `MAX_CHARS`; only texts that are not trusted may be cut."""
    part: list[Span] = []
    size = 0
    for span in spans:
        step = MAX_CHARS if not span.is_trusted else max(len(span.text), 1)
        for start in range(0, len(span.text), step):
            text = span.text[start : start + step]
            part.append(Span(text, span.is_trusted))
            size += len(text)
            if size >= MAX_CHARS:
                yield part
                part, size = [], 0
    if part:
        yield part


def _feed(encoder: IncrementalSpans, spans: list[Span]) -> list[int]:
    ids: list[int] = []
    for span in spans:
        ids += encoder.feed(span)
    return ids


def _size(spans: list[Span]) -> int:
    return sum(len(span.text) for span in spans)


def _has_room(services: Services) -> bool:
    """Whether a request that came whole now would be served, as far as one can say."""
    try:
        check_open(services)
    except RequestError:
        return False
    return services.admission.can_admit(1, services.places)


def _context_length(services: Services) -> int:
    return services.engine.ready.context_length if services.engine.ready else 0


def early_prompt(
    services: Services, kind: str, *names: str, cache_scope: str = ""
) -> EarlyEncoding[str]:
    """Return the early encoding of a text under one of some names at the top of the body."""
    return EarlyEncoding(services, EarlyPrompt(services, frozenset(names)), kind, cache_scope)


def early_chat(
    services: Services, kind: str, places: ChatPlaces | None = None, *, cache_scope: str = ""
) -> EarlyEncoding[list[Span]]:
    """Return the early encoding of a chat; by default one in OpenAI's first dialect."""
    return EarlyEncoding(services, EarlyChat(services, places or ChatPlaces()), kind, cache_scope)
