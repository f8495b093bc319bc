"""The sampler of a GPU: the rules of sampler.py, without waiting for the device.

What a row wants is known on the host before its logits are: parameters, seed, and how many tokens
were drawn before it (each queued draw counts one). Only penalties need what was drawn, and that
history lives on the device, where the kernels keep it up. So a draw is one copy of the rows'
parameters and a few kernels, queued behind the step; whoever reads the ids learns from their sign
which rows had no token.

A grammar's next mask needs the token before, which is read when the step before is settled (see
device_result.DeviceResult): whoever calls `sample` has done so. By then this step's forward pass is
queued, so the device computes while the masks are made.

Log-probabilities of other tokens than the drawn one need lists on the host: a step in which some
row asks for them waits for the device.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tailrace.engine.sampler import (
    Sampled,
    blocked_ids,
    defect_of,
    grammar_fault,
    score_rows,
)
from tailrace.engine.staging import Staging
from tailrace.errors import EngineError
from tailrace.kernels.sampling.rows import NOT_FINITE, NOTHING_LEFT, Asked, SamplingRows
from tailrace.kernels.sampling.triton import SamplingScratch, sample
from tailrace.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tailrace.text.grammar import GrammarState
    from tailrace.types import TokenLogprobs

MOST_EDITS = 2048 + 64
"""Logits that a row may change: the front end's 1024 biases and 1024 stop ids, and EOS ids."""
NO_TOKEN = {
    NOT_FINITE: "the model's logits are not finite",
    NOTHING_LEFT: "no token can be drawn: logit_bias, masks and penalties left none",
}
"""What an id that is none says."""
_MASK64 = (1 << 64) - 1


@dataclass
class _Slot:
    params: SamplingParams
    seed: int
    position: int
    """Tokens drawn so far, those that are queued included."""
    defect: str
    grammar: GrammarState | None
    edit_ids: np.ndarray
    """int32, whose logits are changed: the biases', then what may not be drawn before `min_tokens`
    are out."""
    edit_values: np.ndarray
    """What is added to them: float32, as the words it is stored in."""
    num_biases: int
    is_penalised: bool
    asked: Asked
    is_plain: bool
    """Whether the likeliest id is asked for, and nothing but `num_edits` may change which it is."""

    @property
    def num_edits(self) -> int:
        """How many of the edits count now, from the first."""
        blocks = self.position < self.params.min_tokens
        return len(self.edit_ids) if blocks else self.num_biases

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the likeliest id of its next raw logits, and nothing more, is asked for."""
        return self.is_plain and not self.num_edits


class DeviceSampler:
    """Holds every slot's sampling state and queues draws; see `Sampler` for what they mean.

    Args:
        num_slots: Slots are 0 to `num_slots` - 1.
        vocab_size: Length of a row of logits, V.
        eos_token_ids: Masked, with the request's stop ids, until `min_tokens` are out.
        default_seed: Of the stream that gives requests without a seed theirs.
        device: Where logits lie.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        default_seed: int,
        *,
        device: torch.device,
    ) -> None:
        self.vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._slots: list[_Slot | None] = [None] * num_slots
        self._special: set[int] = set()
        """Slots whose rows may ask for more than the likeliest id."""
        self._seeds = random.Random(default_seed)
        self._device = device
        self._is_gpu = device.type == "cuda"  # else Triton's interpreter, in tests
        self._scratch = SamplingScratch.allocate(num_slots, vocab_size, device)
        self._history = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)
        self._words = -(-vocab_size // 32)
        per_slot = 25 + 2 * MOST_EDITS + self._words
        self._staging = Staging(per_slot * num_slots + 2048, device)

    @torch.inference_mode()
    def admit(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        grammar: GrammarState | None = None,
    ) -> None:
        """Bind a slot to a sequence, new or back after a preemption; see `Sampler.admit`."""
        defect = defect_of(params, self.vocab_size)
        bias = {} if defect else params.logit_bias
        blocked: list[int] = []
        if params.min_tokens:
            blocked = blocked_ids(params, self._eos_token_ids, self.vocab_size)
        is_penalised = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        )
        state = _Slot(
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            position=len(output_ids),
            defect=defect,
            grammar=grammar,
            edit_ids=np.array([*bias, *blocked], dtype=np.int32),
            edit_values=_floats([*bias.values(), *[-np.inf] * len(blocked)]),
            num_biases=len(bias),
            is_penalised=is_penalised,
            asked=Asked.by(
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                ranks=False,
            ),
            is_plain=params.temperature == 0.0
            and params.logprobs is None
            and not (defect or is_penalised or grammar),
        )
        self._slots[slot] = state
        self._special.discard(slot)
        if not state.is_plain or len(state.edit_ids):
            self._special.add(slot)
        if state.is_penalised:
            self._remember(slot, prompt_ids, output_ids)

    def release(self, slot: int) -> None:
        """Forget a slot's sequence; one that has none is no error."""
        self._slots[slot] = None
        self._special.discard(slot)

    def are_plain_greedy(self, slots: Sequence[int]) -> bool:
        """Whether the likeliest id of each row's raw logits, and nothing more, is asked for."""
        if self._special.isdisjoint(slots):  # as most batches are
            return True
        return all(self._state(slot).is_plain_greedy for slot in slots)

    def grammars(self, slots: Sequence[int]) -> dict[int, GrammarState]:
        """Return the grammars of the rows that have one."""
        if self._special.isdisjoint(slots):
            return {}
        states = [self._state(slot).grammar for slot in slots]
        return {row: state for row, state in enumerate(states) if state is not None}

    def count_drawn(self, slots: Sequence[int]) -> None:
        """Note that plain greedy rows were drawn by the runner."""
        for slot in slots:
            self._state(slot).position += 1

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, slots: Sequence[int]) -> Sampled:
        """Queue a draw for each row.

        Args:
            logits: [R, V] of any float dtype; left as they are.
            slots: The rows' slots, admitted before, each at most once. Their grammars have taken
                every token drawn before.

        Returns:
            Ids on the device, below 0 where a row has none (`NO_TOKEN`); errors that are known
            before the draw.

        Raises:
            EngineError: A slot is not admitted.
        """
        states = [self._state(slot) for slot in slots]
        errors = {row: state.defect for row, state in enumerate(states) if state.defect}
        rows = self._rows(states, slots, errors)
        asked = Asked.by_all([state.asked for state in states])
        token_ids = sample(logits, rows, self._scratch, asked).token_ids
        for state in states:
            state.position += 1
        asking = [
            row
            for row, state in enumerate(states)
            if state.params.logprobs is not None and row not in errors
        ]
        scores: dict[int, TokenLogprobs] = {}
        if asking:
            raw = logits[asking].float()
            tops = [states[row].params.logprobs or 0 for row in asking]
            # A row without a token is an error by its id; what its score says is not read.
            found = score_rows(raw, token_ids[asking].clamp(min=0), tops)
            scores = dict(zip(asking, found, strict=True))
        return Sampled(token_ids, [scores.get(row) for row in range(len(states))], errors)

    def rehearse(self, logits: torch.Tensor) -> None:
        """Queue a draw for nobody, by every kernel that any draw asks for; at start.

        Args:
            logits: [1, V] as steps give them.
        """
        self.admit(0, SamplingParams(max_tokens=1, top_p=0.5, seed=0), [], [])
        self.sample(logits, [0])
        self.release(0)

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: torch.Tensor, target_ids: torch.Tensor, top_n: int
    ) -> list[TokenLogprobs]:
        """Score known tokens; see `Sampler.prompt_logprobs`."""
        return score_rows(logits, target_ids, [top_n] * len(target_ids))

    def _state(self, slot: int) -> _Slot:
        state = self._slots[slot]
        if state is None:
            raise EngineError(f"sampler slot {slot} is not admitted; admit it before sampling")
        return state

    def _remember(self, slot: int, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Fill a slot's history: bit 0 is set for what was seen, the rest counts outputs."""
        drawn = np.asarray(output_ids, dtype=np.int32)
        known = np.unique(np.concatenate([np.asarray(prompt_ids, dtype=np.int32), drawn]))
        ids, counts = np.unique(drawn, return_counts=True)
        history = np.ones(len(known), dtype=np.int32)
        history[np.searchsorted(known, ids)] |= counts.astype(np.int32) << 1
        # Only what is known goes over, and from pinned memory: the copy waits for no other work.
        # Torch keeps such memory until the device has read it, so each admission has its own.
        sent = torch.empty(2, len(known), dtype=torch.int32, pin_memory=self._is_gpu)
        sent[0], sent[1] = torch.from_numpy(known), torch.from_numpy(history)
        places, values = sent.to(self._device, non_blocking=True)
        self._history[slot].zero_().index_copy_(0, places.long(), values)

    def _rows(
        self, states: Sequence[_Slot], slots: Sequence[int], errors: dict[int, str]
    ) -> SamplingRows:
        """Send the rows' parameters; a row with a known error draws greedily, for nobody."""
        mask_rows, masks = self._masks(states, errors)
        counts = [state.num_edits for state in states]
        for row, count in enumerate(counts):
            if count > MOST_EDITS:
                errors.setdefault(
                    row, f"logit_bias and min_tokens change more than {MOST_EDITS} logits"
                )
            if row in errors:
                counts[row] = 0
        edited = [(state, count) for state, count in zip(states, counts, strict=True) if count]
        params = [state.params for state in states]
        sent = self._staging.send(
            self._staging.pack(
                {
                    "temperatures": _floats(
                        0.0 if row in errors else p.temperature for row, p in enumerate(params)
                    ),
                    "top_k": np.array([p.top_k for p in params], dtype=np.int32),
                    "top_p": np.array([p.top_p for p in params], dtype=np.float64).view(np.int32),
                    "min_p": _floats(p.min_p for p in params),
                    "seeds": np.array(
                        [state.seed & _MASK64 for state in states], dtype=np.uint64
                    ).view(np.int32),
                    "positions": np.array(
                        [state.position for state in states], dtype=np.int64
                    ).view(np.int32),
                    "presence": _floats(p.presence_penalty for p in params),
                    "frequency": _floats(p.frequency_penalty for p in params),
                    "repetition": _floats(p.repetition_penalty for p in params),
                    "history_rows": np.array(
                        [
                            slot if state.is_penalised and row not in errors else -1
                            for row, (slot, state) in enumerate(zip(slots, states, strict=True))
                        ],
                        dtype=np.int32,
                    ),
                    "edit_starts": np.cumsum([0, *counts], dtype=np.int32),
                    "edit_ids": _joined([state.edit_ids[:count] for state, count in edited]),
                    "edit_values": _joined([state.edit_values[:count] for state, count in edited]),
                    "mask_rows": mask_rows,
                    "masks": masks,
                    "wants_rank": np.zeros(len(states), dtype=np.int32),
                }
            )
        )
        kinds = {
            "top_p": torch.float64,
            "seeds": torch.int64,
            "positions": torch.int64,
            "top_k": torch.int32,
            "history_rows": torch.int32,
            "edit_starts": torch.int32,
            "edit_ids": torch.int32,
            "mask_rows": torch.int32,
            "masks": torch.int32,
            "wants_rank": torch.int32,
        }
        typed = {name: words.view(kinds.get(name, torch.float32)) for name, words in sent.items()}
        return SamplingRows(history=self._history, **typed)

    def _masks(
        self, states: Sequence[_Slot], errors: dict[int, str]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `mask_rows` and `masks`; a row whose grammar fails is an error and has none."""
        rows = np.full(len(states), -1, dtype=np.int32)
        masks: list[np.ndarray] = []
        for row, state in enumerate(states):
            if state.grammar is None or row in errors:
                continue
            mask = state.grammar.mask()[: self._words]
            if state.grammar.error:
                errors[row] = grammar_fault(state.grammar)
                continue
            rows[row] = len(masks)
            masks.append(mask)
        if not masks:
            return rows, np.zeros((0, self._words), dtype=np.int32)
        return rows, np.stack(masks)


def _floats(values: Iterable[float]) -> np.ndarray:
    """Return float32 values as the words they are stored in."""
    # What float32 cannot hold becomes infinite there, which the kernels bound.
    with np.errstate(over="ignore"):
        return np.array(list(values), dtype=np.float32).view(np.int32)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
