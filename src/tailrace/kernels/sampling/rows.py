"""What a step's rows want sampled, as tensors of one device; and what was drawn.

The rules are those of `engine/sampler.py`. Weights are summed as integers, in units of 2^-44 of
the most likely token's: integer sums do not depend on their order, so a row's token depends on
nothing else in the batch, however the sums are split among programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

FIXED_BITS = 44
MAX_VOCAB = 1 << 18
"""So many weights of at most 2^44 sum up within an int64, with a bit to spare."""

NOT_FINITE = -1
"""Stands for a row's token where its raw logits are not finite."""
NOTHING_LEFT = -2
"""Stands for a row's token where bias, masks and penalties left none that can be drawn."""


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """One entry a row, all on the logits' device; R rows, a vocabulary of V."""

    temperatures: Tensor
    """float32 [R]; 0 is greedy: the lowest id of the largest adjusted logit."""
    top_k: Tensor
    """int32 [R]; 0 keeps all."""
    top_p: Tensor
    """float64 [R]; 1 or more keeps all."""
    min_p: Tensor
    """float32 [R]; 0 keeps all."""
    seeds: Tensor
    """int64 [R]: the low 64 bits of the seed."""
    positions: Tensor
    """int64 [R]: tokens drawn before; with the seed, they make the row's uniform number."""
    presence: Tensor
    """float32 [R]; 0: no penalty."""
    frequency: Tensor
    """float32 [R]; 0: no penalty."""
    repetition: Tensor
    """float32 [R]; 1: no penalty."""
    history_rows: Tensor
    """int32 [R]: the row of `history` to penalise by and to count the drawn token in; -1: none."""
    history: Tensor
    """int32 [S, V]: bit 0 is set for tokens seen in prompt or output, the rest counts outputs."""
    edit_starts: Tensor
    """int32 [R+1]: where each row's part of the edits starts."""
    edit_ids: Tensor
    """int32 [N]: tokens whose logits change before the penalties."""
    edit_values: Tensor
    """float32 [N], added: a bias, or minus infinity for what `min_tokens` keeps out."""
    mask_rows: Tensor
    """int32 [R]: the row of `masks` that says what a grammar allows; -1: everything."""
    masks: Tensor
    """int32 [M, W], 32 W >= V: bit i % 32 of word i // 32 is set where token i may be drawn."""
    wants_rank: Tensor
    """int32 [R]: not 0 where the drawn token's rank is wanted."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What some row of a step may ask for; it may say more than is so."""

    draws: bool = True
    """A temperature that is not 0; without it the next two are not asked for either."""
    searches: bool = True
    """top_k or top_p."""
    filters: bool = True
    """top_k, top_p or min_p."""
    ranks: bool = True
    """The drawn token's rank."""

    @classmethod
    def by(
        cls, *, temperature: float, top_k: int, top_p: float, min_p: float, ranks: bool
    ) -> Asked:
        """Return what one row asks for."""
        draws = temperature != 0.0
        searches = draws and (top_k > 0 or top_p < 1.0)
        return cls(
            draws=draws, searches=searches, filters=searches or (draws and min_p > 0), ranks=ranks
        )

    @classmethod
    def by_all(cls, rows: Collection[Asked]) -> Asked:
        """Return what several rows ask for together."""
        return cls(
            draws=any(row.draws for row in rows),
            searches=any(row.searches for row in rows),
            filters=any(row.filters for row in rows),
            ranks=any(row.ranks for row in rows),
        )


EVERYTHING = Asked()


@dataclass(frozen=True)
class Drawn:
    """What was drawn."""

    token_ids: Tensor
    """int64 [R]; `NOT_FINITE` or `NOTHING_LEFT` where there is none, and the history is as was."""
    logprobs: Tensor
    """float32 [R], of the raw logits; NaN where there is no token."""
    ranks: Tensor
    """int32 [R]: 1 and the number of larger raw logits; 1 where it was not wanted."""
