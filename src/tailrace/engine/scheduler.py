"""State in, one mixed batch out. Pure: no device, no clock, no I/O.

Rules, in this order:
1. One token budget a step, no phases: decodes and prefill chunks share a batch. Where a time is to
   be kept (pace.py), the prompts beside decodes are cut to it as well.
2. Decodes come first, one token each, so that no prompt can starve a running stream.
3. What the budget leaves goes to prefills in order (priority, then fair shares of keys, see
   shares.py, then age): first those under way, then new ones. Several may be mid-prefill at once.
4. A waiting sequence is admitted where a slot is free and its expected length can be leased; or, on
   borrowed units, where its prompt is available now and what remains lets everybody grow by a few
   tokens, in which somebody will likely end. Who was preempted four times needs a full lease.
5. Out of units, a sequence inside its lease gets them back from the youngest borrower, which is
   preempted: recomputed later, or swapped out where that is quicker. One beyond its lease can
   preempt only borrowers younger than itself, else it is the one to go. So nobody is preempted
   inside a full lease, each preemption at least doubles the lease that is asked for, and after the
   fourth it is a full one: everybody ends.
6. A prompt's chunk is cut to what is available before anybody is preempted for it.
7. Nobody is admitted in a step that preempted somebody.
8. What a step has left when nobody waits goes to prompts that are still arriving; they are the
   first to give units up (early_prompts.py).
9. After a step that found no memory on the device, its chunks are computed again, in steps of half
   the token budget; every so many steps without such a failure it doubles again.
10. A preempted sequence whose last token is still in flight waits until that token is known.
11. No priority starves: after fifteen admissions past somebody of a lower priority, whoever of
   those has waited longest is admitted next.

Steps overlap (see sequence.py): `schedule` may be called for step N+1 before `commit` of step N.
Units that a preempted or finished sequence gives back may be handed out at once although a step
in flight still writes to them: the device runs steps in order, so the new owner writes last.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from tailrace.engine.early_prompts import STEP_SHARE, EarlyPrompts
from tailrace.engine.forecast import AnswerLengths
from tailrace.engine.sequence import NO_SLOT, Sequence, Status
from tailrace.engine.shares import Shares
from tailrace.engine.step_time import StepLoad
from tailrace.errors import EngineError
from tailrace.types import attended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tailrace.engine.block_manager import BlockManager, Table
    from tailrace.engine.host_units import KvCopy
    from tailrace.engine.pace import Pace

_LEAST_BUDGET_SHARE = 8
"""One part in so many of the token budget is the least that lack of memory leaves to prompts."""
_STEPS_TO_RECOVER = 64
# What is kept for each running sequence when somebody starts on borrowed units. More costs
# concurrency, less costs preemptions: docs/performance.md, "The block manager".
GROWTH_TOKENS = 19
_PATIENCE = 4
"""Preemptions after which a sequence waits for a full lease."""
MOST_OVERTAKEN = 15
"""Admissions in a row of others than the lowest priority, while somebody of a lower one waits."""


class Chunk(msgspec.Struct, frozen=True):
    """Tokens [start, end) of one sequence, to be computed in one step."""

    sequence: Sequence
    slot: int
    start: int
    end: int
    samples: bool
    """Whether the last position yields a new token."""
    from_device: bool
    """Whether the (single) input token is the pending one, known to the device only."""

    @property
    def num_tokens(self) -> int:
        """Positions to compute."""
        return self.end - self.start


@dataclass
class Step:
    """What the runner does next; `admitted` and `released` come before the chunks."""

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    preempted: int = 0
    victims: list[Sequence] = field(default_factory=list)
    """Who was sent back."""
    swapped_out: list[tuple[Sequence, KvCopy]] = field(default_factory=list)
    """Copied to the host before anything else of the step; counts as a step in flight."""
    swapped_in: list[tuple[Sequence, KvCopy]] = field(default_factory=list)
    """Copied back after that."""
    num_tokens: int = 0
    """Positions to compute in all."""
    padding: int = 0
    """Rows that the device computes beside the decodes, for its own convenience."""
    prompt_limit: int | None = None
    """Most prompt tokens, where the step's time allows fewer than its token budget."""
    prefill_context: int = 0
    """Positions that prompt tokens attend to, summed."""
    decodes: int = 0
    """Chunks of one token, whatever they are part of."""
    decode_context: int = 0

    @property
    def load(self) -> StepLoad:
        """What the chunks ask for, padding not counted."""
        return StepLoad(
            self.num_tokens - self.decodes, self.prefill_context, self.decodes, self.decode_context
        )

    @property
    def padded_load(self) -> StepLoad:
        """The same, with the decodes' padding."""
        return replace(self.load, decodes=self.decodes + self.padding)

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        self.chunks.append(chunk)
        tokens = chunk.end - chunk.start
        self.num_tokens += tokens
        if tokens == 1:
            self.decodes += 1
            self.decode_context += chunk.end
        else:
            self.prefill_context += attended(chunk.start, chunk.end)

    def drop(self, sequence: Sequence) -> None:
        """Take a sequence's chunk out again, if it has one."""
        kept = [chunk for chunk in self.chunks if chunk.sequence is not sequence]
        self.chunks, self.num_tokens, self.prefill_context = [], 0, 0
        self.decodes = self.decode_context = 0
        for chunk in kept:
            self.add(chunk)


class Scheduler:
    """Decides who runs; owns the waiting and running lists and the slots.

    Args:
        blocks: The KV units, asked and told by nobody else.
        max_batch_size: Slots.
        token_budget: Most positions of a step; at least `max_batch_size`.
        padded_decodes: Rows that the device computes for so many decodes. What it adds counts
            against the budget of prompts, so that full steps are of sizes that it has captured.
        whole_prompts: Of (decodes, prompt tokens): the largest size up to there that the device
            computes without padding. What arrives early is cut to it, where it is cut at all.
        pace: Cuts the prompts of steps that carry decodes to a time; None: tokens alone count.
        swap_pays: Whether computing so many tokens again takes longer than copying so many units
            out and back; None: nobody is swapped out.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_batch_size: int,
        token_budget: int,
        padded_decodes: Callable[[int], int] = lambda decodes: decodes,
        whole_prompts: Callable[[int, int], int] = lambda decodes, tokens: tokens,  # noqa: ARG005
        pace: Pace | None = None,
        swap_pays: Callable[[int, int], bool] | None = None,
    ) -> None:
        if token_budget < max_batch_size:
            raise EngineError(f"token budget {token_budget} < max batch size {max_batch_size}")
        self.blocks = blocks
        self.token_budget = token_budget
        self._padded_decodes = padded_decodes
        self._whole_prompts = whole_prompts
        self.pace = pace
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions_total = 0
        self.returns_total = 0
        """Preemptions that gave lent units back to an owner; others had outgrown their lease."""
        self.answers = AnswerLengths()
        self.shares = Shares()
        self._overtaken = 0
        self._budget_now = token_budget
        self._steps_since_cut = 0
        self._rewound: list[Sequence] = []
        early_tokens = max(token_budget // STEP_SHARE, blocks.unit_tokens)
        self.early = EarlyPrompts(
            blocks, first_slot=max_batch_size, step_tokens=min(early_tokens, token_budget)
        )
        self._free_slots = list(range(max_batch_size - 1, -1, -1))
        self._released: list[int] = []
        self.swap_pays = swap_pays
        self._swapped_out: list[tuple[Sequence, KvCopy]] = []
        self._refused: tuple[str, int] | None = None
        """Who did not fit, and how often anything had been given back by then."""

    @property
    def has_work(self) -> bool:
        """Whether anybody waits or runs, or could be computed early."""
        return bool(self.waiting or self.running) or self.early.has_work(self.token_budget)

    @property
    def places_free(self) -> int:
        """Slots that nobody has."""
        return len(self._free_slots)

    def add(self, sequence: Sequence) -> None:
        """Queue a waiting sequence at its place in the order."""
        if sequence.start is None:
            guess = self.answers.expect(0, sequence.max_output)
            sequence.expected_cost = sequence.num_prompt + guess
            sequence.start = self.shares.enter(
                sequence.priority, sequence.key, sequence.share, sequence.expected_cost
            )
        bisect.insort(self.waiting, sequence, key=lambda s: s.order)

    def finish(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Take a sequence out, wherever it is, and give back what it holds.

        Args:
            sequence: Waiting or running.
            forget: Whether its KV is not to be trusted, so that no prefix of it is reused.
        """
        if sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
            self.early.drop(sequence, forget=forget)
            self.blocks.release(sequence.request_id)
            self.blocks.drop_swapped(sequence.request_id)
        else:
            self._give_back(sequence, forget=forget)
            if sequence.num_output:
                self.answers.observe(sequence.num_output)
        sequence.move("finish")
        self._settle_share(sequence)

    def _settle_share(self, sequence: Sequence) -> None:
        """Charge a sequence's key what it has really cost."""
        if sequence.start is None:  # it never came whole
            return
        has_run = sequence.num_computed or sequence.num_output or sequence.preemptions
        prompt = max(0, sequence.num_prompt - sequence.cached_tokens) if has_run else 0
        surplus = prompt + sequence.num_output - sequence.expected_cost
        self.shares.leave(sequence.priority, sequence.key, sequence.share, surplus)

    def schedule(self) -> Step:
        """Choose the next step's chunks; empty chunks mean that there is nothing to do now."""
        step = Step()
        self._recover_budget()
        self.blocks.advance(self._at_the_end())
        decoding: list[Sequence] = []
        ending: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self.running:
            if sequence.uncomputed != 1:
                prompts.append(sequence)
            elif sequence.num_computed < sequence.num_prompt:
                ending.append(sequence)
            else:
                decoding.append(sequence)
        # A prompt's last token comes after all decodes, whatever its priority: where prompts have
        # a copy of the weights, all that stands behind a prompt's row is served by the copy.
        self._extend_all(step, decoding + ending)
        step.padding = self._padded_decodes(step.num_tokens) - step.num_tokens
        step.prompt_limit = self._prompt_limit(step)
        self._extend_all(step, prompts)
        if not step.preempted:
            self._admit(step)
            if not self.waiting:
                self._add_early(step)
        if step.chunks:  # an empty step is not run, so it must carry nothing away
            step.released, self._released = self._released, []
            again = [s for s in self._rewound if s.status is Status.RUNNING]
            step.admitted, self._rewound = again + step.admitted, []
            step.swapped_out, self._swapped_out = self._swapped_out, []
        self._note_issued(step)
        return step

    def _add_early(self, step: Step) -> None:
        """Fill a step up with prompts that are still arriving, as far as it stays in time."""

        def fitting(start: int, wanted: int) -> int:
            return self._in_time(step.padded_load, start, wanted)

        for sequence, end in self.early.grow(self._early_limit(step), fitting):
            step.add(_chunk(sequence, end))

    def _early_limit(self, step: Step) -> int:
        """Return how many early tokens to add at most: all, or what fills the step's frame."""
        most = min(self._left(step), self.early.step_tokens)
        load, taken = step.padded_load, 0
        prompts = load.prefill_tokens
        for start, left in self.early.ahead():
            wanted = max(0, min(left, most - taken))
            fitting = self._in_time(load, start, wanted)
            taken += fitting
            if fitting < left:
                return self._whole_prompts(load.decodes, prompts + taken) - prompts
            load = load.with_chunk(start, fitting)
        return taken

    def _in_time(self, load: StepLoad, start: int, wanted: int) -> int:
        """Return how many of a prompt's next tokens a step has time for beside its decodes."""
        if self.pace is None or not load.decodes:
            return wanted
        return self.pace.fitting(load, start, wanted)

    def _at_the_end(self) -> Iterable[Table]:
        """Tables without room for the next token."""
        for sequence in self.running:
            table = sequence.kv
            if table is not None and sequence.num_computed >= table.capacity:
                yield table

    def commit(self, chunk: Chunk) -> None:
        """Note that a chunk has run: its full blocks become findable in the prefix cache."""
        self.retire(chunk)
        sequence = chunk.sequence
        is_back = sequence.is_recovering and chunk.end >= sequence.recover_to
        # Who had a token is back with its next one.
        if is_back and (chunk.samples or not sequence.num_output):
            sequence.recover_to = 0
            sequence.spent.is_behind = False
        # Preempted or finished meanwhile: its units are gone. (Running again is impossible: a
        # preempted sequence is not admitted while it has steps in flight.)
        table = sequence.kv
        if sequence.status is Status.ARRIVING:
            return  # private until its request has come whole
        if table is not None and chunk.end >= table.commit_at:
            self.blocks.commit(table, sequence.token_ids, chunk.end)

    def retire_copies(self, step: Step, *, failed: bool = False) -> None:
        """Note that a step's copies to the host are made, or that nobody knows what is there."""
        for sequence, _ in step.swapped_out:
            sequence.steps_in_flight -= 1
            if failed:
                self.blocks.drop_swapped(sequence.request_id)

    @staticmethod
    def retire(chunk: Chunk) -> None:
        """Note that a chunk is no longer in flight, whether or not its KV can be used."""
        chunk.sequence.steps_in_flight -= 1
        if chunk.samples:
            chunk.sequence.pending_tokens -= 1

    def _extend_all(self, step: Step, sequences: list[Sequence]) -> None:
        """Give sequences their next chunks; some may be preempted for those before them."""
        for sequence in sequences:
            left = self._left(step)
            if left <= 0:
                return
            if sequence.status is Status.RUNNING and sequence.wants_work:
                self._extend(step, sequence, left)

    def _extend(self, step: Step, sequence: Sequence, left: int) -> None:
        """Give a running sequence its next chunk, at the cost of borrowers if need be."""
        end = self._chunk_end(step, sequence, left)
        table = _table_of(sequence)
        if end > table.capacity:
            end = self._grow(step, sequence, table, end)
            if not end:
                return
        step.add(_chunk(sequence, end))

    def _grow(self, step: Step, sequence: Sequence, table: Table, end: int) -> int:
        """Make room up to `end`; return where there is room to, or 0: `sequence` was preempted.

        missing     |==========|=========|       units of this chunk
                      its claim  beyond it
        available   |=======|                    short of its claim: a borrower must go
        available   |==============|             else a prompt's chunk is cut to this
        """
        blocks = self.blocks
        if not table.lease.wanted and sequence.uncomputed == 1:
            self._expect_more(sequence, table)
        while True:
            missing, available = blocks.missing(table, end), blocks.available_units
            if missing <= available:
                blocks.grow(table, end)
                return end
            if self.early.give_way(to=sequence, kept_too=True):
                continue
            owed = min(missing, table.lease.claim)
            reachable = table.capacity + available * blocks.unit_tokens
            if owed <= available and reachable > sequence.num_computed:
                end = reachable
                continue
            victim = self._victim(sequence, is_owner=owed > 0)
            self._preempt(step, victim)
            if victim is sequence:
                return 0
            self.returns_total += owed > 0

    def _victim(self, sequence: Sequence, *, is_owner: bool) -> Sequence:
        """Choose the youngest borrower; who is not an owner may have to go itself."""
        borrowers = set(self.blocks.borrowers())
        if not is_owner:
            borrowers.add(sequence.request_id)
        return next(s for s in reversed(self.running) if s.request_id in borrowers)

    def _expect_more(self, sequence: Sequence, table: Table) -> None:
        """Guess again for a sequence that outgrew its lease."""
        so_far = sequence.num_output + sequence.pending_tokens
        sequence.expected_output = self.answers.expect(so_far, sequence.max_output)
        self.blocks.expect(table, sequence.num_prompt + sequence.expected_output)

    def _chunk_end(self, step: Step, sequence: Sequence, left: int) -> int:
        """Where a chunk ends that takes what the step's budget has left."""
        start, wanted = sequence.num_computed, min(sequence.uncomputed, left)
        if self.pace is not None and wanted > 1:
            # Of who is new, the limit did not know how much of its prompt is cached.
            wanted = self.pace.chunk(step.padded_load, start, wanted)
        return start + wanted

    def _left(self, step: Step) -> int:
        left = self._budget_now - step.num_tokens - step.padding
        if step.prompt_limit is None:
            return left
        return min(left, step.prompt_limit - (step.num_tokens - step.decodes))

    def _prompt_limit(self, step: Step) -> int | None:
        """Return how many prompt tokens the step has time for beside the decodes it now holds."""
        if self.pace is None or not step.decodes:
            return None
        most = max(0, self._left(step))
        return self.pace.limit(step.padded_load, self._prompts_ahead(), most)

    def _prompts_ahead(self) -> Iterator[tuple[int, int]]:
        """Yield who is to be computed next, in order: tokens computed before, and left."""
        for sequence in self.running:
            if sequence.uncomputed > 1:
                yield sequence.num_computed, sequence.uncomputed
        for sequence in self.waiting[: len(self._free_slots)]:
            yield sequence.num_computed, sequence.uncomputed

    def _admit(self, step: Step) -> None:
        """Start waiting sequences, in order, while slots, units and budget last."""
        while self.waiting and self._free_slots and self._left(step) > 0:
            sequence = self._next()
            if sequence.steps_in_flight and sequence.kv is None:
                return
            if not self._fits(sequence):
                # Where nobody runs, nobody gives anything back: kept work could block for good.
                if self.early.give_way(to=sequence, kept_too=not self.running):
                    continue
                return  # nobody overtakes: smaller ones cannot starve the first in order
            self.waiting.remove(sequence)
            self._note_overtaking(sequence)
            table = self._table_for(step, sequence)
            if not sequence.preemptions:
                sequence.cached_tokens = table.cached_tokens
            sequence.move("admit")
            sequence.slot = self._free_slots.pop()
            bisect.insort(self.running, sequence, key=lambda s: s.order)
            step.admitted.append(sequence)
            end = self._chunk_end(step, sequence, self._left(step))
            self.blocks.grow(table, end)
            step.add(_chunk(sequence, end))

    def _next(self) -> Sequence:
        """Choose who is admitted next: the first in order, or who was overtaken for long."""
        first = self.waiting[0]
        if self._overtaken < MOST_OVERTAKEN:
            return first
        lower = (s for s in self.waiting if s.priority > first.priority)
        return min(lower, key=lambda s: (s.arrival_s, s.request_id), default=first)

    def _note_overtaking(self, admitted: Sequence) -> None:
        """Count who goes before others of a lower priority, once it has left the waiting list."""
        self.shares.begin(admitted.priority, admitted.start or 0.0)
        is_past = bool(self.waiting) and self.waiting[-1].priority > admitted.priority
        was_due = self._overtaken >= MOST_OVERTAKEN
        self._overtaken = self._overtaken + 1 if is_past and not was_due else 0

    def _table_for(self, step: Step, sequence: Sequence) -> Table:
        """Open a table for who is admitted, or go on with the one filled early or swapped out."""
        expected = sequence.num_prompt + sequence.expected_output
        table = self.early.admit(sequence)
        if table is not None:
            self.blocks.expect(table, expected)
            return table
        table = self.blocks.open(
            sequence.request_id, sequence.token_ids, sequence.cache_salt, expected
        )
        sequence.kv = table
        sequence.num_computed = table.cached_tokens
        swapped = self.blocks.swapped_tokens(sequence.request_id)
        if swapped > table.cached_tokens:
            step.swapped_in.append((sequence, self.blocks.swap_in(table)))
            sequence.num_computed = swapped
        elif swapped:
            self.blocks.drop_swapped(sequence.request_id)
        return table

    def _fits(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may start; guesses how long it will become."""
        blocks = self.blocks
        if self._refused == (sequence.request_id, blocks.closings):
            return False  # nothing was given back since
        guess = self.answers.expect(sequence.num_output, sequence.max_output)
        if sequence.preemptions:  # rule 5: at least twice as long as it was
            doubled = min(2 * sequence.num_output, sequence.max_output)
            guess = max(guess, sequence.expected_output, doubled)
        sequence.expected_output = guess
        fits = self._has_room(sequence)
        self._refused = None if fits else (sequence.request_id, blocks.closings)
        return fits

    def _has_room(self, sequence: Sequence) -> bool:
        blocks, table = self.blocks, sequence.kv
        expected = sequence.num_prompt + sequence.expected_output
        promised, held = blocks.reserved_for(sequence.request_id), 0
        if table is not None:  # filled early
            promised, held = table.lease.claim, len(table.units)
        unclaimed = blocks.unclaimed_units + promised
        # What was reserved for this one may be lent out: promised is not there.
        if blocks.units_for(expected) - held <= min(unclaimed, blocks.available_units):
            return True
        # What running sequences hold of its prefix costs nothing; looked up only where it matters.
        tokens, salt = sequence.token_ids, sequence.cache_salt
        if table is not None:
            now = blocks.missing(table, sequence.length + 1)
        else:
            now = blocks.demand(tokens, salt, sequence.length + 1)
        later = blocks.units_for(expected) - blocks.units_for(sequence.length + 1)
        if now > blocks.available_units:
            return False
        if not self.running or now + later <= unclaimed:
            return True
        if sequence.preemptions >= _PATIENCE:
            return False
        others = blocks.reserved_units - blocks.reserved_for(sequence.request_id)
        growth = blocks.units_for(GROWTH_TOKENS * len(self.running))
        return now + growth + others <= blocks.available_units

    def _preempt(self, step: Step, victim: Sequence) -> None:
        """Send a running sequence back to wait, to be recomputed."""
        step.drop(victim)
        self._swap_out(victim)
        self._give_back(victim)
        step.victims.append(victim)
        victim.move("preempt")
        victim.recover_to = max(victim.recover_to, victim.num_computed)
        victim.num_computed = 0
        victim.preemptions += 1
        self.preemptions_total += 1
        step.preempted += 1
        self.add(victim)

    def cut_budget(self) -> int:
        """Halve the token budget for a while: a step found no memory; return what is left of it."""
        # Not below a token for each stream: rule 2 holds in hard times too.
        streams = len(self._free_slots) + len(self.running)
        least = min(self.token_budget, streams + max(1, self.token_budget // _LEAST_BUDGET_SHARE))
        self._budget_now = max(least, self._budget_now // 2)
        self._steps_since_cut = 0
        return self._budget_now

    def _recover_budget(self) -> None:
        if self._budget_now == self.token_budget:
            return
        self._steps_since_cut += 1
        if self._steps_since_cut >= _STEPS_TO_RECOVER:
            self._steps_since_cut = 0
            self._budget_now = min(self.token_budget, 2 * self._budget_now)

    def rewind(self, sequence: Sequence, num_computed: int) -> None:
        """Have a running sequence computed again from there: what came after brought nothing.

        None of its steps may be in flight. Runners are told of it as of one that is admitted: they
        have counted draws of its that never were.
        """
        sequence.num_computed = num_computed
        if sequence not in self._rewound:
            self._rewound.append(sequence)

    @staticmethod
    def unheard(step: Step) -> list[Sequence]:
        """Return whose admission was lost with a step that failed, but no chunk: rewind them."""
        computed = {chunk.sequence for chunk in step.chunks}
        return [
            sequence
            for sequence in step.admitted
            if sequence.status is Status.RUNNING and sequence not in computed
        ]

    def _swap_out(self, victim: Sequence) -> None:
        """Have the KV of who is preempted copied to the host, where that pays and there is room."""
        tokens = victim.num_computed
        if self.swap_pays is None or not tokens or not victim.wants_work:
            return
        if self.swap_pays(tokens, self.blocks.units_for(tokens)):
            copy = self.blocks.swap_out(_table_of(victim), tokens)
            if copy is not None:
                self._swapped_out.append((victim, copy))

    def _give_back(self, sequence: Sequence, *, forget: bool = False) -> None:
        self.blocks.close(_table_of(sequence), forget=forget)
        sequence.kv = None
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._released.append(sequence.slot)
        sequence.slot = NO_SLOT

    @staticmethod
    def _note_issued(step: Step) -> None:
        """Account for the step as if it had run: the next one builds on it."""
        for chunk in step.chunks:
            chunk.sequence.num_computed = chunk.end
            chunk.sequence.steps_in_flight += 1
            if chunk.samples:
                chunk.sequence.pending_tokens += 1
        for sequence, _ in step.swapped_out:
            sequence.steps_in_flight += 1


def _table_of(sequence: Sequence) -> Table:
    if sequence.kv is None:
        raise EngineError(f"sequence {sequence.request_id} runs without a table")
    return sequence.kv


def _chunk(sequence: Sequence, end: int) -> Chunk:
    return Chunk(
        sequence=sequence,
        slot=sequence.slot,
        start=sequence.num_computed,
        end=end,
        samples=end == sequence.length,
        from_device=sequence.num_computed >= len(sequence.token_ids),
    )
