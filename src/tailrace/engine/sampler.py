"""Logits in, token ids out.

Rules:
1. State lives here, by slot: a step may be prepared before the ids of the one before are known, so
   counts for penalties, `min_tokens` and the random stream's position follow the sampled tokens
   themselves.
2. A row's token depends on its own logits, parameters, seed and position, and on nothing else in
   the batch: one uniform number per token, from a counter-based hash of (seed, position), and the
   inverse of the cumulative distribution in the order of token ids.
3. The order is the one in `types.SamplingParams`: bias, min_tokens mask, grammar mask, penalties,
   temperature, top_k, top_p, min_p, draw. Log-probabilities are those of the raw logits.
4. Filters are thresholds on the probability, so equally likely tokens stay or go together: which
   of them a sort would put first never matters. Beyond a tie top_k keeps exactly k.
5. No sort of the vocabulary in the common case: the threshold is sought among the few hundred most
   likely tokens, for a row where it lies deeper among some thousand, and only then in all. The
   threshold is the same number whichever of them finds it.
6. A row that has no valid token (logits not finite, everything masked) is an error of that row
   alone. Minus infinity is a valid logit: a token that is never drawn.
7. A grammar goes on with the drawn token here, where it is known first, so that constrained rows
   are scheduled like any other; the mask for the next one is made while the model runs.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from tailrace.errors import EngineError
from tailrace.kernels.sampling.reference import uniform
from tailrace.text.grammar import allowed
from tailrace.types import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tailrace.text.grammar import GrammarState
    from tailrace.types import SamplingParams

# Candidates looked at before a whole row is sorted. The same for every batch: a row's way through
# the filters must not depend on its neighbours.
_CANDIDATES = 256
# Looked at next, a row at a time. Of 256 rows of SmolLM2's logits, at temperature 1 and top_p 0.95,
# six in ten needed more than 256 tokens, and one in a hundred more than 4096.
_MORE_CANDIDATES = 4096
# Tokens per partial sum of the draw. The vocabularies of Llama 3, Qwen and SmolLM2 are multiples.
_SPAN = 128
# Looked at beyond the most likely tokens that a row reports. Logits in bfloat16 are often equal.
_TIES = 8


@dataclass
class Sampled:
    """What one call of `sample` brought; R rows."""

    token_ids: Tensor
    """int64 [R]; 0 where the row is in `errors`."""
    logprobs: list[TokenLogprobs | None]
    """None where the row did not ask, or is in `errors`."""
    errors: dict[int, str] = field(default_factory=dict)
    """By row: why it has no valid token. Its slot's state has not moved."""
    completed: frozenset[int] = frozenset()
    """Rows whose grammar allows nothing after this token."""


@dataclass
class _Slot:
    params: SamplingParams
    seed: int
    position: int
    """Tokens drawn so far."""
    defect: str = ""
    """Why nothing can be drawn with these parameters; such a row fails alone, when sampled."""
    blocked_ids: Tensor | None = None
    """int64, what may not be drawn before `min_tokens` are out; only where it is asked for."""
    bias_ids: Tensor | None = None
    bias: Tensor | None = None
    counts: Tensor | None = None
    """int32 [V], output tokens; only where a penalty needs it."""
    seen: Tensor | None = None
    """bool [V], prompt or output; only for repetition_penalty."""
    grammar: GrammarState | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the logits are used as they are."""
        return (
            self.bias is None
            and self.counts is None
            and self.seen is None
            and self.grammar is None
            and not self.is_blocking
        )

    @property
    def is_blocking(self) -> bool:
        return self.blocked_ids is not None and self.position < self.params.min_tokens

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
        default_seed: Of the stream that gives requests without a seed theirs, in order of
            admission: a replayed run repeats itself. A sequence without a seed goes on with
            another one after a preemption.
        device: Where the logits and the per-slot state live.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        default_seed: int,
        *,
        device: str | torch.device = "cpu",
    ) -> None:
        self.vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._slots: list[_Slot | None] = [None] * num_slots
        self._seeds = random.Random(default_seed)
        self._device = torch.device(device)

    @torch.inference_mode()
    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        grammar: GrammarState | None = None,
    ) -> None:
        """Bind a slot to a sequence, new or back after a preemption.

        Args:
            slot: Whose former owner, if any, is forgotten.
            params: How to draw.
            prompt_ids: Count for repetition_penalty.
            output_ids: Already drawn; they count for penalties, min_tokens and the position.
            grammar: What may be drawn, in the state after `output_ids`; the slot's from now on.

        Raises:
            EngineError: There is no such slot.
        """
        self._check_slot(slot)
        state = _Slot(
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            position=len(output_ids),
            defect=defect_of(params, self.vocab_size),
            grammar=grammar,
        )
        if params.min_tokens:
            state.blocked_ids = self._ids(blocked_ids(params, self._eos_token_ids, self.vocab_size))
        if params.logit_bias and not state.defect:
            state.bias_ids = self._ids(params.logit_bias)
            state.bias = torch.tensor(
                list(params.logit_bias.values()), dtype=torch.float32, device=self._device
            )
        if params.presence_penalty or params.frequency_penalty:
            counts = torch.bincount(self._ids(output_ids), minlength=self.vocab_size)
            state.counts = counts.to(torch.int32)
        if params.repetition_penalty != 1.0:
            known = {*prompt_ids, *output_ids}
            state.seen = torch.zeros(self.vocab_size, dtype=torch.bool, device=self._device)
            state.seen[self._ids(known)] = True
        self._slots[slot] = state

    def release(self, slot: int) -> None:
        """Forget a slot's sequence; one that has none is no error.

        Raises:
            EngineError: There is no such slot.
        """
        self._check_slot(slot)
        self._slots[slot] = None

    @torch.inference_mode()
    def sample(self, logits: Tensor, slots: Sequence[int]) -> Sampled:
        """Draw one token a row.

        Args:
            logits: float32 [R, V]; may be written to.
            slots: The rows' slots, admitted before, each at most once.

        Raises:
            EngineError: The logits have another shape than the slots and the vocabulary say, or a
                slot is not admitted.
        """
        if logits.shape != (len(slots), self.vocab_size):
            raise EngineError(
                f"logits {list(logits.shape)} for {len(slots)} slots and a vocabulary of "
                f"{self.vocab_size}"
            )
        states = [self._state(slot) for slot in slots]
        errors = _broken_rows(logits)
        errors |= {row: state.defect for row, state in enumerate(states) if state.defect}
        asking = [
            row
            for row, state in enumerate(states)
            if state.params.logprobs is not None and row not in errors
        ]
        raw = logits[asking] if asking else None  # a copy, made before the logits are adjusted
        for row, state in enumerate(states):
            if not state.is_plain:
                _adjust(logits[row], state)
            if state.grammar is not None and state.grammar.error:
                errors.setdefault(row, grammar_fault(state.grammar))
        token_ids = _draw(logits, states, errors)
        scores = _scores(raw, asking, states, token_ids)
        for row, state in enumerate(states):
            if row not in errors:
                _advance(state, token_ids[row : row + 1])
        logprobs = [None if row in errors else scores.get(row) for row in range(len(states))]
        return Sampled(token_ids, logprobs, errors, _follow(states, token_ids, errors))

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: Tensor, target_ids: Tensor, top_n: int
    ) -> list[TokenLogprobs]:
        """Score known tokens: logits float32 [R, V], target_ids int64 [R].

        Logits that are not finite give NaN: the request's sampled row, which attends to the same
        positions, is the one that reports the error.
        """
        return score_rows(logits, target_ids, [top_n] * len(target_ids))

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < len(self._slots):
            raise EngineError(f"sampler slot {slot}: slots are 0 to {len(self._slots) - 1}")

    def _state(self, slot: int) -> _Slot:
        self._check_slot(slot)
        state = self._slots[slot]
        if state is None:
            raise EngineError(f"sampler slot {slot} is not admitted; admit it before sampling")
        return state

    def _ids(self, ids: Sequence[int] | set[int] | dict[int, float]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.int64, device=self._device)


def defect_of(params: SamplingParams, vocab_size: int) -> str:
    """Name what the front end should have refused: it would end the step, or draw nonsense."""
    if not 0.0 <= params.temperature < math.inf:  # NaN is refused as well
        return f"temperature {params.temperature}: must be finite and at least 0"
    for token_id in params.logit_bias:
        if not 0 <= token_id < vocab_size:
            return f"logit_bias: {token_id} is no token id; ids are 0 to {vocab_size - 1}"
    return ""


def grammar_fault(grammar: GrammarState) -> str:
    """Say why a sequence cannot go on."""
    return f"the output cannot follow its grammar any further: {grammar.error}"


def blocked_ids(params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Return what may not be drawn before `min_tokens` are out."""
    # An id outside the vocabulary can never be drawn, so it needs no mask.
    return sorted(i for i in {*eos_token_ids, *params.stop_token_ids} if 0 <= i < vocab_size)


def _broken_rows(logits: Tensor) -> dict[int, str]:
    # The maximum is NaN where any logit is, and not finite where nothing can be drawn.
    peaks = logits.amax(dim=-1).tolist()
    return {
        row: f"the model's logits are not finite (the largest is {peak})"
        for row, peak in enumerate(peaks)
        if not math.isfinite(peak)
    }


def _adjust(row: Tensor, state: _Slot) -> None:
    """Apply bias, masks and penalties to one row of logits [V], in place."""
    params = state.params
    if state.bias is not None and state.bias_ids is not None:
        row[state.bias_ids] += state.bias
    if state.is_blocking and state.blocked_ids is not None:
        row[state.blocked_ids] = -torch.inf
    if state.grammar is not None:
        keep = torch.from_numpy(allowed(state.grammar.mask(), len(row))).to(row.device)
        row.masked_fill_(~keep, -torch.inf)
    if state.seen is not None:
        penalty = params.repetition_penalty
        penalised = torch.where(row > 0, row / penalty, row * penalty)
        torch.where(state.seen, penalised, row, out=row)
    if state.counts is not None:
        row -= params.frequency_penalty * state.counts
        row -= params.presence_penalty * (state.counts > 0)


def _advance(state: _Slot, token_id: Tensor) -> None:
    """Take in the drawn token, int64 [1], without waiting for the device."""
    state.position += 1
    if state.counts is not None:
        state.counts[token_id] += 1
    if state.seen is not None:
        state.seen[token_id] = True


def _follow(states: list[_Slot], token_ids: Tensor, errors: dict[int, str]) -> frozenset[int]:
    """Let grammars go on with what was drawn; return the rows of those that are complete."""
    completed = set()
    for row, state in enumerate(states):
        if state.grammar is None or row in errors:
            continue
        state.grammar.take(int(token_ids[row]))
        if state.grammar.is_complete:
            completed.add(row)
        state.grammar.look_ahead()
    return frozenset(completed)


def _draw(logits: Tensor, states: list[_Slot], errors: dict[int, str]) -> Tensor:
    """Return one id a row of adjusted logits, int64 [R]; note rows that have none in `errors`."""
    if all(s.is_greedy and s.is_plain for s in states) and not errors:
        return logits.argmax(dim=-1)  # the lowest id on a tie
    peaks = logits.amax(dim=-1, keepdim=True)
    for row, peak in enumerate(peaks[:, 0].tolist()):
        if not math.isfinite(peak):
            errors.setdefault(
                row,
                "no token can be drawn: after logit_bias, masks and penalties the largest logit "
                f"is {peak}",
            )
    token_ids = torch.zeros(len(states), dtype=torch.int64, device=logits.device)
    greedy = [i for i, s in enumerate(states) if s.is_greedy and i not in errors]
    if greedy:
        token_ids[greedy] = logits.argmax(dim=-1)[greedy]
    rows = [i for i, s in enumerate(states) if not s.is_greedy and i not in errors]
    if rows:
        index = torch.tensor(rows, device=logits.device)
        chosen = logits if len(rows) == len(states) else logits[index]
        token_ids[index] = _draw_rows(chosen, peaks[index], [states[i] for i in rows])
    return token_ids


def _draw_rows(logits: Tensor, peaks: Tensor, states: list[_Slot]) -> Tensor:
    """Draw from logits [R, V], whose maxima are peaks [R, 1]: int64 [R]. Uses up the logits."""
    # A temperature that float32 cannot hold would be 0 or infinite there, and 0 / 0 is NaN.
    float32 = torch.finfo(torch.float32)
    temperatures = torch.tensor(
        [min(max(s.params.temperature, float32.tiny), float32.max) for s in states]
    )
    # The maximum is subtracted first, for a division by a tiny temperature would overflow.
    weights = logits.sub_(peaks).div_(temperatures.to(logits.device)[:, None]).exp_()
    filtered = [i for i, s in enumerate(states) if s.is_filtered]
    if filtered:
        thresholds = torch.zeros(len(states), 1, device=weights.device)
        thresholds[filtered] = _thresholds(weights[filtered], [states[i] for i in filtered])
        weights.mul_(weights >= thresholds)
    draws = [uniform(s.seed, s.position) for s in states]
    return _invert(weights, torch.tensor(draws, dtype=torch.float64, device=weights.device))


def _thresholds(weights: Tensor, states: list[_Slot]) -> Tensor:
    """Return the least weight that the filters keep, float32 [R, 1], for weights [R, V]."""
    vocab_size = weights.shape[1]
    width = min(vocab_size, _CANDIDATES)
    limits = _Limits.of(states, weights)
    ranked = torch.topk(weights, width, dim=-1).values
    totals = _in_spans(weights).sum(dim=-1).sum(dim=-1, dtype=torch.float64)
    found, is_certain = _cut(ranked, totals, limits, vocab_size)
    for row in (~is_certain).nonzero()[:, 0].tolist() if width < vocab_size else ():
        part = slice(row, row + 1)
        found[part] = _deep_threshold(weights[part], totals[part], limits.row(row))
    return found


def _deep_threshold(weights: Tensor, total: Tensor, limits: _Limits) -> Tensor:
    """Do what `_thresholds` does, for one row [1, V] where the candidates did not suffice."""
    vocab_size = weights.shape[1]
    if vocab_size > _MORE_CANDIDATES:
        ranked = _largest(weights, _MORE_CANDIDATES)
        found, is_certain = _cut(ranked, total, limits, vocab_size)
        if is_certain.item():
            return found
    return _cut(_largest(weights, vocab_size), total, limits, vocab_size)[0]


@dataclass
class _Limits:
    """The filters' parameters as columns [R, 1]; a filter that is off keeps all."""

    top_k: Tensor
    """int64"""
    top_p: Tensor
    """float64"""
    min_p: Tensor
    """float32, like the weights it is compared with"""

    @classmethod
    def of(cls, states: list[_Slot], weights: Tensor) -> _Limits:
        rows, device = [s.params for s in states], weights.device
        everything = weights.shape[1]
        return cls(
            torch.tensor([[min(p.top_k, everything) or everything] for p in rows], device=device),
            torch.tensor(
                [[p.top_p if p.top_p < 1.0 else torch.inf] for p in rows],
                dtype=torch.float64,
                device=device,
            ),
            torch.tensor([[p.min_p] for p in rows], dtype=torch.float32, device=device),
        )

    def row(self, row: int) -> _Limits:
        part = slice(row, row + 1)
        return _Limits(self.top_k[part], self.top_p[part], self.min_p[part])


def _cut(ranked: Tensor, totals: Tensor, limits: _Limits, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Find the least weight to keep among the K largest weights of each row, sorted downwards.

        ranked        1.0  .5  .5  .3  .1 | what lies beyond the K candidates
        top_k = 2     keeps 1.0 .5 .5       the second weight is .5, and so is the third
        top_p = .6    keeps 1.0 .5 .5       at the .5s the mass before is 1.0 of 2.4, less than .6
        min_p = .4    keeps 1.0 .5 .5

    Args:
        ranked: float32 [R, K]; the first of each row is 1.
        totals: float64 [R], of all weights of the row.
        limits: The rows' parameters.
        vocab_size: V; K = V means that nothing lies beyond.

    Returns:
        float32 [R, 1], and bool [R]: whether the candidates suffice to know it.
    """
    width = ranked.shape[1]
    kth = ranked.gather(1, limits.top_k.clamp(max=width) - 1)
    in_top_k = ranked >= kth
    sums = (ranked * in_top_k).cumsum(dim=-1, dtype=torch.float64)
    before = torch.zeros_like(sums)
    before[:, 1:] = sums[:, :-1]
    keeps_all = limits.top_k >= vocab_size
    # top_p is a share of what top_k left.
    mass = torch.where(keeps_all, totals[:, None], sums[:, -1:])
    inside = in_top_k & (before < limits.top_p * mass) & (ranked >= limits.min_p)
    least = ranked.gather(1, inside.sum(dim=-1, keepdim=True).clamp(min=1) - 1)
    # Unknown: a threshold, or a tie with it, that reaches the last candidate.
    last = ranked[:, -1:]
    is_certain = ((last < least) & (keeps_all | (last < kth))) | (last == 0)
    return least, is_certain[:, 0]


def _largest(row: Tensor, count: int) -> Tensor:
    """Return the largest weights of a row [1, V], sorted downwards: [1, count]."""
    if row.device.type != "cpu":
        return torch.topk(row, count, dim=-1).values
    values = row.numpy()  # NumPy selects and sorts some three times as fast here
    if count < values.shape[1]:
        values = np.partition(values, -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


def _in_spans(weights: Tensor) -> Tensor:
    """View weights [R, V] as [R, ceil(V / span), span], padded with zeros where need be."""
    padding = -weights.shape[1] % _SPAN
    padded = torch.nn.functional.pad(weights, (0, padding)) if padding else weights
    return padded.view(len(weights), -1, _SPAN)


def _invert(weights: Tensor, draws: Tensor) -> Tensor:
    """Return the first id at which each row's cumulative weight exceeds draw x total, int64 [R].

    Two levels, for the running sum of a whole row in float64 would take longest of all:

        spans     | .2  0 .1 | .3 .1  0 |  0 .3  0 |    weights in the order of ids
        sums             .3         .7        1.0       draw .65 -> second span, .65 - .3 inside it
        inside               .3 .4 .4                   .35 -> its second token

    Args:
        weights: float32 [R, V], at least one of each row above 0.
        draws: float64 [R], in [0, 1).
    """
    spans = _in_spans(weights)
    sums = spans.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    aims = draws[:, None] * sums[:, -1:]
    span = _first_above(sums, aims)
    before = torch.nn.functional.pad(sums, (1, 0)).gather(1, span)
    inside = spans[torch.arange(len(spans), device=spans.device), span[:, 0]]
    offset = _first_above(inside.cumsum(dim=-1, dtype=torch.float64), aims - before)
    return (span * _SPAN + offset)[:, 0]


def _first_above(sums: Tensor, aims: Tensor) -> Tensor:
    """Return each row's first index int64 [R, 1] with sum > aim, or else where the total is met.

    Either way the sum rises at that index, so a weight of 0 is never chosen. The aim is below the
    total but for rounding, whether of draw x total or of the two levels' sums.
    """
    index = torch.searchsorted(sums, aims, right=True)
    total_met = (sums < sums[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(index, total_met)


def _scores(
    raw: Tensor | None, rows: list[int], states: list[_Slot], token_ids: Tensor
) -> dict[int, TokenLogprobs]:
    """Score the drawn tokens of the rows that asked, by row; raw is float32 [len(rows), V]."""
    if raw is None:
        return {}
    top_ns = [states[row].params.logprobs or 0 for row in rows]
    return dict(zip(rows, score_rows(raw, token_ids[rows], top_ns), strict=True))


def score_rows(logits: Tensor, target_ids: Tensor, top_ns: Sequence[int]) -> list[TokenLogprobs]:
    """Score one token a row, and each row's top_ns[row] most likely ones.

    Args:
        logits: float32 [R, V].
        target_ids: int64 [R].
        top_ns: How many of the most likely tokens each row reports.
    """
    columns = target_ids[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    ranks = (logits > logits.gather(1, columns)).sum(dim=-1) + 1
    # Further than asked for: one tells whether a tie crosses the border, some hold most ties whole.
    reach = min(max(top_ns, default=0) + 1 + _TIES, logits.shape[1])
    values, ids = torch.topk(logits, reach, dim=-1)
    # One wait for the device, whatever the rows: float64 holds every id and float32 as they are.
    parts = [columns, logprobs.gather(1, columns), ranks[:, None]]
    parts += [values, ids, logprobs.gather(1, ids)]
    read = torch.cat([part.to(torch.float64) for part in parts], dim=1).tolist()
    tops = [
        _Top(count, row[3 : 3 + reach], row[3 + reach : 3 + 2 * reach], row[3 + 2 * reach :])
        for count, row in zip(top_ns, read, strict=True)
    ]
    _look_up_ties(logits, tops)
    scores = []
    for (token_id, logprob, rank, *_), top in zip(read, tops, strict=True):
        top_ids, top_logprobs = top.ranked()
        scores.append(TokenLogprobs(int(token_id), logprob, int(rank), top_ids, top_logprobs))
    return scores


@dataclass
class _Top:
    """A row's largest logits, on the host.

    `topk` picks any of equally likely tokens, and others where a neighbour asks for more of them:
    a greedy token could be missing from its own list.
    """

    count: int
    """How many are wanted; none where it is below 1."""
    values: list[float]
    """Descending; more than `count`, if there are so many."""
    ids: list[float]
    logprobs: list[float]

    @property
    def is_cut(self) -> bool:
        """Whether tokens as likely as the last wanted one may be missing."""
        return 0 < self.count < len(self.values) and self.values[self.count - 1] == self.values[-1]

    def replace_ties(self, lowest: list[int]) -> None:
        """Put the lowest ids of the last value, in order, in the place of those that are here."""
        border = self.values[-1]
        first = self.values.index(border)
        ties = lowest[: len(self.values) - first]
        self.ids[first:] = ties
        self.logprobs[first:] = [self.logprobs[first]] * len(ties)

    def ranked(self) -> tuple[list[int], list[float]]:
        """Return ids and log-probabilities of the wanted ones, the lowest id first on a tie."""
        entries = zip(self.values, self.ids, self.logprobs, strict=True)
        ranked = sorted(entries, key=lambda entry: (-entry[0], entry[1]))[: max(0, self.count)]
        return [int(token_id) for _, token_id, _ in ranked], [score for *_, score in ranked]


def _look_up_ties(logits: Tensor, tops: Sequence[_Top]) -> None:
    """Complete the rows whose border a tie may cross, all with one more wait for the device."""
    cut = [row for row, top in enumerate(tops) if top.is_cut]
    if not cut:
        return
    rows = logits[cut]
    borders = torch.tensor(
        [tops[row].values[-1] for row in cut], dtype=logits.dtype, device=logits.device
    )
    # The lowest ids are the largest of these; there are at least as many as are wanted of them.
    backwards = torch.arange(rows.shape[1], 0, -1, dtype=torch.int32, device=logits.device)
    order = torch.where(rows == borders[:, None], backwards, 0)
    found = torch.topk(order, len(tops[cut[0]].values), dim=-1).values
    for row, lowest in zip(cut, (rows.shape[1] - found).tolist(), strict=True):
        tops[row].replace_ties(lowest)
