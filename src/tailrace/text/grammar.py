"""Grammars that constrain the output, over llguidance: compiled once, followed token by token.

    text --compile--> Grammar --start--> GrammarState --mask--> draw --take--> mask ...

Rules
1. A grammar comes from a client, so everything about it is bounded: its text, its compilation and
   each of its masks have fuel, which is counted and not timed. What runs out is refused when it is
   compiled, or ends that one sequence when it is followed. The first mask is the dearest, so it
   belongs to compiling, and so does a trial step.
2. End-of-sequence tokens are allowed where what is there is complete, and nowhere else. A state is
   complete once nothing can follow; whoever draws need not wait for an end-of-sequence token then.
3. Copies of a matcher share their lexer, whose states are bounded and only grow. So a state that
   runs out of them begins again with a matcher of its own, and a grammar that is worn out is not
   handed out any more: a sequence fails by what itself needs, never by what others used up.
4. The next mask depends on the token before. It is looked ahead for, on a thread, while the model
   computes the logits that it is for; the library lets go of the GIL.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import llguidance
import numpy as np

from tailrace.errors import TailraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

MAX_GRAMMAR_BYTES = 64 * 1024
"""Of one grammar's text. Compiling 64 KiB of schema takes some tenths of a second at the worst."""

_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=100_000,
    step_lexer_fuel=50_000,
    step_max_items=50_000,
    max_lexer_states=30_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
_MASK_THREADS = 4
_KEPT = 32
"""Compiled grammars that are kept: the same schema comes with request after request."""


class GrammarError(TailraceError):
    """A grammar that is malformed, cannot be satisfied, or takes more than the bounds allow."""


class GrammarCompiler:
    """Compiles grammars for one model, on a thread of its own, and keeps the last ones.

    The threads are started by whoever calls `compile_soon` first, and inherit the cores that the
    caller may run on.

    Args:
        folder: Holds tokenizer.json, which is read by `load`, or else for the first grammar.
        vocab_size: Of the model's logits.
        eos_token_ids: What ends a sequence.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._fault = ""
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._compile_lock = threading.Lock()
        self._keep_lock = threading.Lock()
        """Held for moments, where `_compile_lock` is held for as long as a grammar takes."""
        self._compiling: ThreadPoolExecutor | None = None
        self._masking: ThreadPoolExecutor | None = None
        self._counting = threading.Lock()
        self.waiting = 0
        """Grammars that `compile_soon` was asked for and that are not done."""

    def load(self) -> None:
        """Read the tokenizer; what cannot be read is the error of every grammar.

        It holds the interpreter throughout, for a second where the vocabulary has 150k tokens: so
        before anybody is served.
        """
        try:
            self._loaded()
        except GrammarError:
            return  # again, when a grammar comes

    def compile_soon(self, text: str) -> Future[Grammar]:
        """Compile on the thread; the result raises GrammarError as `compile` does.

        One that is kept waits for no other.
        """
        if self._compiling is None:
            self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            self._masking = _started_pool(_MASK_THREADS)
        found = self.kept(text)
        if found is not None:
            done: Future[Grammar] = Future()
            done.set_result(found)
            return done
        self._count(1)
        compiling = self._compiling.submit(self.compile, text)
        compiling.add_done_callback(lambda _: self._count(-1))
        return compiling

    def _count(self, change: int) -> None:
        with self._counting:
            self.waiting += change

    def compile(self, text: str) -> Grammar:
        """Return a compiled grammar.

        Args:
            text: llguidance's own form, as `LLMatcher.grammar_from_...` makes it.

        Raises:
            GrammarError: It is malformed or too large, or the model has no end-of-sequence token.
        """
        size = len(text.encode("utf-8", "replace"))
        if size > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"it has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}")
        with self._compile_lock:
            found = self.kept(text)
            if found is not None:
                return found
            grammar = Grammar(
                self._matcher(text), lambda: self._fresh(text), self._words, self._masking
            )
            with self._keep_lock:
                self._kept[text] = grammar
                self._kept.move_to_end(text)
                while len(self._kept) > _KEPT:
                    self._kept.popitem(last=False)
            return grammar

    def kept(self, text: str) -> Grammar | None:
        """Return a grammar that is compiled already; at once, whatever is being compiled."""
        with self._keep_lock:
            found = self._kept.get(text)
            if found is None or found.is_worn:
                return None
            self._kept.move_to_end(text)
            return found

    def close(self) -> None:
        """Let the threads end."""
        for pool in (self._compiling, self._masking):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    @property
    def _words(self) -> int:
        return -(-self._loaded().vocab_size // 32)

    def _loaded(self) -> llguidance.LLTokenizer:
        if self._fault:
            raise GrammarError(self._fault)
        if self._tokenizer is None:
            try:
                self._tokenizer = self._read()
            # The library raises what it likes on a tokenizer that it does not know.
            except Exception as error:
                self._fault = f"the model's tokenizer does not go with grammars: {error}"
                raise GrammarError(self._fault) from error
        return self._tokenizer

    def _read(self) -> llguidance.LLTokenizer:
        if not self._eos_token_ids:
            raise GrammarError("the model has no end-of-sequence token, so no output can end")
        return llguidance.LLTokenizer(
            (self._folder / "tokenizer.json").read_text(encoding="utf-8"),
            n_vocab=self._vocab_size,
            eos_token=self._eos_token_ids,
        )

    def _fresh(self, text: str) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._loaded(), text, log_level=0, limits=_LIMITS)

    def _matcher(self, text: str) -> llguidance.LLMatcher:
        matcher = self._fresh(text)
        _check(matcher)
        # What the first step works out stays with the matcher and its copies; and most of what is
        # too complex to be followed fails right there.
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        _check(matcher)
        first = np.flatnonzero(allowed(mask, self._vocab_size))
        trial = matcher.deep_copy()
        trial.consume_tokens(first[:1].tolist())
        _check(trial)
        return matcher


class Grammar:
    """A compiled grammar; any number of sequences start from it."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        remake: Callable[[], llguidance.LLMatcher],
        words: int,
        masking: ThreadPoolExecutor | None,
    ) -> None:
        self.is_worn = False
        """Whether the lexer that all its states share has run out."""
        self._matcher = matcher
        self._remake = remake
        self._words = words
        self._masking = masking

    def start(self, token_ids: Sequence[int] = ()) -> GrammarState:
        """Return the state after these tokens.

        Args:
            token_ids: What was generated already, where a sequence comes back.
        """
        state = GrammarState(self, self._matcher.deep_copy(), self._words, self._masking)
        for token_id in token_ids:
            state.take(token_id)
        state.look_ahead()
        return state

    def remade(self) -> llguidance.LLMatcher:
        """Return a matcher that shares nothing, for a state that found the shared lexer worn."""
        self.is_worn = True
        return self._remake()


class GrammarState:
    """Where one sequence is in its grammar. Belongs to one thread at a time."""

    def __init__(
        self,
        grammar: Grammar,
        matcher: llguidance.LLMatcher,
        words: int,
        masking: ThreadPoolExecutor | None,
    ) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._is_shared = True
        self._taken: list[int] = []
        self._mask = np.zeros(words, dtype=np.int32)
        self._is_filled = False
        self._masking = masking
        self._ahead: Future[None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        """Why the sequence cannot go on; empty where it can."""
        return _reason(self._matcher) if self._matcher.is_error() else ""

    def look_ahead(self) -> None:
        """Start on the next mask, on the thread."""
        if self._masking is not None and not self._is_filled and not self.is_complete:
            self._ahead = self._masking.submit(self._fill)

    def mask(self) -> np.ndarray:
        """Return which tokens may come next: int32 [words], bit i % 32 of word i // 32 is token i.

        What it says is void where `error` is set afterwards.
        """
        if self._ahead is not None:
            self._ahead.result()
            self._ahead = None
        elif not self._is_filled:
            self._fill()
        return self._mask

    def take(self, token_id: int) -> None:
        """Go on by a token that was drawn; one that is not allowed is an `error` from then on."""
        if self._ahead is not None:
            self._ahead.result()
            self._ahead = None
        self._taken.append(token_id)
        if not self._matcher.consume_token(token_id):
            self._begin_again()
        self._is_filled = False

    def _fill(self) -> None:
        self._compute()
        if self._matcher.is_error() and self._is_shared:
            self._begin_again()
            self._compute()
        self._is_filled = True

    def _compute(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)

    def _begin_again(self) -> None:
        """Come to the same place with a matcher of its own; what fails there as well has failed."""
        if self._is_shared:
            self._is_shared = False
            self._matcher = self._grammar.remade()
            self._matcher.consume_tokens(self._taken)


def _started_pool(threads: int) -> ThreadPoolExecutor:
    """Return a pool whose threads run: later they would be started by who hands work in."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="mask")
    everyone = threading.Barrier(threads)
    for started in [pool.submit(everyone.wait) for _ in range(threads)]:
        started.result()
    return pool


def allowed(mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return a mask as bool [vocab_size]."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab_size).view(np.bool_)


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(_reason(matcher))


def _reason(matcher: llguidance.LLMatcher) -> str:
    text = matcher.get_error().replace("<non-verbose/>", "").strip()
    first = " ".join(text.split())
    return first[:300] or "it cannot be followed"
