"""One choice in the making: engine outputs become pieces of text, up to a stop string.

    engine ids --> detokenizer (whole characters) --> stop strings (held back, cut) --> Piece

A token that ended the sequence (EOS, stop id) counts and is scored, but is no text.
No stop string counts that ends within the first `min_tokens` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tailrace.text.detokenizer import Detokenizer
from tailrace.text.stops import StopStrings

if TYPE_CHECKING:
    from tailrace.server.sampling import TextRules
    from tailrace.text.tokenizer import Tokenizer
    from tailrace.types import TokenLogprobs, TokenOutput


@dataclass(slots=True)
class Piece:
    """What one engine output, or several of one choice, add to the answer."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string, or the stop token's id, that ended the choice; None for EOS."""

    def absorb(self, later: Piece) -> None:
        """Append a later piece of the same choice."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


class Choice:
    """Turns the outputs of one sequence into pieces.

    Args:
        index: The choice's number within the answer.
        tokenizer: The model's.
        rules: Stop strings and the like.
        stop_token_ids: The client's own; only these are a `stop_reason`.
        min_tokens: So many come whatever their text.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        rules: TextRules,
        stop_token_ids: tuple[int, ...],
        *,
        min_tokens: int = 0,
    ) -> None:
        self.index = index
        self.is_finished = False
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=rules.skip_special_tokens)
        self._stops = StopStrings(rules.stops, include_stop=rules.include_stop)
        self._watches_stops = bool(rules.stops)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._free_tokens = min_tokens if rules.stops else 0
        """Tokens to come whose text is free of stops."""

    def take(self, output: TokenOutput) -> Piece:
        """Return what an output adds; it may finish the choice before the engine does."""
        is_last = output.finish_reason is not None
        text = self._text(output, is_last)
        self.is_finished = is_last or self._stops.hit is not None
        piece = Piece(
            self.index,
            text,
            list(output.token_ids),
            output.logprobs or [],
            output.prompt_logprobs,
            output.finish_reason,
        )
        if self._stops.hit is not None:
            piece.finish_reason, piece.stop_reason = "stop", self._stops.hit
        elif output.stop_token_id in self._stop_token_ids:
            piece.stop_reason = output.stop_token_id
        return piece

    def _text(self, output: TokenOutput, is_last: bool) -> str:
        spoken = output.token_ids
        if spoken and output.stop_token_id is not None:
            spoken = spoken[:-1]
        if not self._watches_stops:
            text = self._detokenizer.push(spoken)
            return text + self._detokenizer.finish() if is_last else text
        text = ""
        if self._free_tokens:
            free, spoken = spoken[: self._free_tokens], spoken[self._free_tokens :]
            self._free_tokens -= len(free)
            text, _ = self._stops.push(self._detokenizer.push(free), is_free=True)
        later = self._detokenizer.push(spoken)
        if is_last:
            later += self._detokenizer.finish()
        later, hit = self._stops.push(later, is_free=self._free_tokens > 0)
        text += later
        return text + self._stops.finish() if is_last and hit is None else text
