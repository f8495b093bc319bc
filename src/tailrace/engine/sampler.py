"""Logits in, token ids out.

Rules:
1. State lives here, by slot: a step may be prepared before the ids of the one before are known, so
   counts for penalties, `min_tokens` and the random stream's position follow the sampled tokens
   themselves.
2. A row's token depends on its own logits, parameters, seed and position, and on nothing else in
   the batch: one uniform number per token, from a counter-based hash of (seed, position), and the
   inverse of the cumulative distribution.
3. The order is the one in `types.SamplingParams`: bias, min_tokens mask, penalties, temperature,
   top_k, top_p, min_p, draw. Log-probabilities are those of the raw logits.
4. No sort of the vocabulary in the common case: filters look at the few hundred most likely tokens
   first, and only rows that need more are sorted whole.
5. A row whose logits are not finite is an error of that row alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from tailrace.types import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tailrace.types import SamplingParams

# Candidates looked at before a whole row is sorted; top_p 0.95 rarely needs more of them.
_CANDIDATES = 256
_MASK64 = (1 << 64) - 1


@dataclass
class Sampled:
    """What one call of `sample` brought; R rows."""

    token_ids: Tensor
    """int64 [R]; 0 where the row is in `errors`."""
    logprobs: list[TokenLogprobs | None]
    errors: dict[int, str] = field(default_factory=dict)
    """By row: why it has no valid token."""


@dataclass
class _Slot:
    params: SamplingParams
    seed: int
    position: int
    """Tokens drawn so far."""
    blocked_ids: list[int]
    """What may not be drawn before `min_tokens` are out."""
    bias_ids: Tensor | None = None
    bias: Tensor | None = None
    counts: Tensor | None = None
    """int32 [V], output tokens; only where a penalty needs it."""
    seen: Tensor | None = None
    """bool [V], prompt or output; only for repetition_penalty."""

    @property
    def is_plain(self) -> bool:
        """Whether the logits are used as they are."""
        return (
            self.bias is None
            and self.counts is None
            and self.seen is None
            and self.position >= self.params.min_tokens
        )

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0.0

    @property
    def is_filtered(self) -> bool:
        params = self.params
        return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


class Sampler:
    """Holds every slot's sampling state and draws.

    Args:
        num_slots: Slots are 0 to `num_slots` - 1.
        vocab_size: Length of a row of logits, V.
        eos_token_ids: Masked, with the request's stop ids, until `min_tokens` are out.
        default_seed: Of the stream that gives requests without a seed theirs.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, eos_token_ids: Sequence[int], default_seed: int
    ) -> None:
        self.vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._slots: list[_Slot | None] = [None] * num_slots
        self._seeds = random.Random(default_seed)

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        """Bind a slot to a sequence, new or back after a preemption.

        Args:
            slot: Whose former owner, if any, is forgotten.
            params: How to draw.
            prompt_ids: Count for repetition_penalty.
            output_ids: Already drawn; they count for penalties, min_tokens and the position.
        """
        state = _Slot(
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            position=len(output_ids),
            blocked_ids=sorted({*self._eos_token_ids, *params.stop_token_ids}),
        )
        if params.logit_bias:
            state.bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
            state.bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        if params.presence_penalty or params.frequency_penalty:
            state.counts = torch.bincount(
                torch.tensor(list(output_ids), dtype=torch.int64), minlength=self.vocab_size
            )
        if params.repetition_penalty != 1.0:
            state.seen = torch.zeros(self.vocab_size, dtype=torch.bool)
            state.seen[torch.tensor([*prompt_ids, *output_ids], dtype=torch.int64)] = True
        self._slots[slot] = state

    def release(self, slot: int) -> None:
        """Forget a slot's sequence."""
        self._slots[slot] = None

    def sample(self, logits: Tensor, slots: Sequence[int]) -> Sampled:
        """Draw one token a row.

        Args:
            logits: float32 [R, V]; may be written to.
            slots: The row's slots, admitted before.
        """
        states = [self._state(slot) for slot in slots]
        errors = _unusable_rows(logits)
        raw = {
            row: logits[row].clone() if not state.is_plain else logits[row]
            for row, state in enumerate(states)
            if state.params.logprobs is not None and row not in errors
        }
        for row, state in enumerate(states):
            if not state.is_plain and row not in errors:
                _adjust(logits[row], state)
        token_ids = self._draw(logits, states, errors)
        scored = self._score(raw, states, token_ids)
        for row, (state, token_id) in enumerate(zip(states, token_ids.tolist(), strict=True)):
            if row not in errors:
                _advance(state, token_id)
        return Sampled(token_ids, [scored.get(row) for row in range(len(states))], errors)

    def prompt_logprobs(
        self, logits: Tensor, target_ids: Tensor, top_n: int
    ) -> list[TokenLogprobs]:
        """Score known tokens: logits float32 [R, V], target_ids int64 [R]."""
        return score_rows(logits, target_ids, [top_n] * len(target_ids))

    def _state(self, slot: int) -> _Slot:
        state = self._slots[slot]
        if state is None:
            raise KeyError(f"sampler slot {slot} is not admitted")
        return state

    def _draw(self, logits: Tensor, states: list[_Slot], errors: dict[int, str]) -> Tensor:
        greedy = logits.argmax(dim=-1)  # the lowest id on a tie
        for row in errors:
            greedy[row] = 0
        drawn = [i for i, s in enumerate(states) if not s.is_greedy and i not in errors]
        for filtered in (False, True):
            rows = [i for i in drawn if states[i].is_filtered is filtered]
            if rows:
                chosen = [states[i] for i in rows]
                index = torch.tensor(rows)
                draw = _draw_filtered if filtered else _draw_unfiltered
                greedy[index] = draw(_tempered(logits[index], chosen), chosen)
        return greedy

    @staticmethod
    def _score(
        raw: dict[int, Tensor], states: list[_Slot], token_ids: Tensor
    ) -> dict[int, TokenLogprobs]:
        if not raw:
            return {}
        rows = list(raw)
        top_ns = [states[row].params.logprobs or 0 for row in rows]
        scores = score_rows(torch.stack(list(raw.values())), token_ids[rows], top_ns)
        return dict(zip(rows, scores, strict=True))


def score_rows(logits: Tensor, target_ids: Tensor, top_ns: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of one token a row, and of each row's most likely ones.

    Args:
        logits: float32 [R, V].
        target_ids: int64 [R].
        top_ns: How many of the most likely tokens each row reports.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    targets = logprobs.gather(1, target_ids[:, None])
    ranks = (logprobs > targets).sum(dim=1) + 1
    widest = min(max(top_ns), logits.shape[1])
    top = torch.topk(logprobs, widest, dim=-1) if widest else None
    top_ids = top.indices.tolist() if top else [[]] * len(top_ns)
    top_values = top.values.tolist() if top else [[]] * len(top_ns)
    return [
        TokenLogprobs(token_id, logprob, rank, ids[:n], values[:n])
        for token_id, logprob, rank, n, ids, values in zip(
            target_ids.tolist(),
            targets[:, 0].tolist(),
            ranks.tolist(),
            top_ns,
            top_ids,
            top_values,
            strict=True,
        )
    ]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone.

    SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014),
    applied to the seed and then to the position's place in that seed's sequence.
    """
    start = _mix(seed & _MASK64)
    return (_mix((start + (position + 1) * 0x9E3779B97F4A7C15) & _MASK64) >> 11) / (1 << 53)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _unusable_rows(logits: Tensor) -> dict[int, str]:
    # One pass: a sum is finite unless a NaN or an infinity is in it.
    finite = torch.isfinite(logits.sum(dim=-1)).tolist()
    return {
        row: "the model's logits are not finite" for row, is_ok in enumerate(finite) if not is_ok
    }


def _adjust(row: Tensor, state: _Slot) -> None:
    """Apply bias, the min_tokens mask and penalties to one row of logits [V], in place."""
    params = state.params
    if state.bias is not None and state.bias_ids is not None:
        row[state.bias_ids] += state.bias
    if state.position < params.min_tokens and state.blocked_ids:
        row[torch.tensor(state.blocked_ids)] = -torch.inf
    if state.seen is not None:
        penalty = params.repetition_penalty
        penalised = torch.where(row > 0, row / penalty, row * penalty)
        torch.where(state.seen, penalised, row, out=row)
    if state.counts is not None:
        row -= params.frequency_penalty * state.counts
        row -= params.presence_penalty * (state.counts > 0)


def _advance(state: _Slot, token_id: int) -> None:
    state.position += 1
    if state.counts is not None:
        state.counts[token_id] += 1
    if state.seen is not None:
        state.seen[token_id] = True


def _tempered(logits: Tensor, states: list[_Slot]) -> Tensor:
    """Return unnormalised probabilities [R, V], the most likely one being 1."""
    # The maximum is subtracted first: dividing by a tiny temperature could overflow otherwise.
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    temperatures = torch.tensor([s.params.temperature for s in states])[:, None]
    return torch.exp(shifted / temperatures)


def _draw_unfiltered(weights: Tensor, states: list[_Slot]) -> Tensor:
    return _invert(weights, states)


def _draw_filtered(weights: Tensor, states: list[_Slot]) -> Tensor:
    """Draw from what top_k, top_p and min_p leave: [R, V] -> int64 [R]."""
    vocab_size = weights.shape[1]
    width = min(vocab_size, max(_CANDIDATES, *(s.params.top_k for s in states)))
    top = torch.topk(weights, width, dim=-1)
    totals = weights.sum(dim=-1, dtype=torch.float64)
    kept, is_certain = _filter(top.values, totals, states)
    tokens = top.indices.gather(1, _invert(kept, states)[:, None])[:, 0]
    # Rows whose filters reach beyond the candidates are sorted whole.
    for row in [] if width == vocab_size else (~is_certain).nonzero()[:, 0].tolist():
        order = torch.sort(weights[row : row + 1], dim=-1, descending=True, stable=True)
        kept, _ = _filter(order.values, totals[row : row + 1], states[row : row + 1])
        tokens[row] = order.indices[0, _invert(kept, states[row : row + 1])[0]]
    return tokens


def _filter(ranked: Tensor, totals: Tensor, states: list[_Slot]) -> tuple[Tensor, Tensor]:
    """Zero what the filters drop from weights sorted downwards.

    Args:
        ranked: float32 [R, K], the K largest of each row.
        totals: float64 [R], the sum over the whole row.
        states: The rows' parameters.

    Returns:
        The weights [R, K] with the dropped ones zero, and bool [R]: whether the K largest decide.
    """
    width = ranked.shape[1]
    top_k = torch.tensor([s.params.top_k or _MASK64 >> 1 for s in states])[:, None]
    top_p = torch.tensor([s.params.top_p for s in states], dtype=torch.float64)[:, None]
    min_p = torch.tensor([s.params.min_p for s in states])[:, None]
    kept = ranked * (torch.arange(width) < top_k)
    sums = kept.cumsum(dim=-1, dtype=torch.float64)
    # top_p is a share of what top_k left: of the candidates if it is among them, else of the row.
    limits = top_p * torch.where(top_k <= width, sums[:, -1:], totals[:, None])
    inside = (sums - kept) < limits
    # top_p 1 keeps all: sums of one row in two orders need not agree to the last bit.
    inside |= top_p >= 1.0
    inside[:, 0] = True
    result = kept * inside * (kept >= min_p * ranked[:, :1])
    is_certain = (result[:, -1] == 0) | (top_k[:, 0] <= width)
    return result, is_certain


def _invert(weights: Tensor, states: list[_Slot]) -> Tensor:
    """Return the index int64 [R] at which each row's cumulative weight passes u x total."""
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    draws = torch.tensor([uniform(s.seed, s.position) for s in states], dtype=torch.float64)
    index = torch.searchsorted(sums, draws[:, None] * sums[:, -1:], right=True)[:, 0]
    # u < 1, but u x total may round up to the total: the last token of any weight is meant then.
    # (searchsorted from the right never stops on a zero weight elsewhere.)
    last = (sums < sums[:, -1:]).sum(dim=-1)
    return torch.minimum(index, last)
