"""Where a sequence's time in the engine goes: every moment belongs to one phase.

    arrival ------- queue ------->| its first step begins
    step ends     e1     e2     e3     a chunk's end settles all that passed since the last one

What passed is its own prefill before the first token, decode after it, and "preempted" from the
end of its last step before it was sent back until it is computed again as far as it was. Within
prefill and decode, a step's time is divided among its tokens alike: the part of other sequences'
prompts is what this one waited for others. The engine sums that part over all steps, and a sequence
takes what the sum grew by, less its own part. So nobody is looked at in a step that has no chunk of
his, and a decode, which has no part in the sum, only at its end: O(1) for a prompt's chunk, nothing
for a token of an answer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepSums:
    """What steps took, summed over the engine's life."""

    prompts_s: float = 0.0
    """Seconds of steps, times the share of prompt tokens in each."""
    started_s: float = 0.0
    """When the step that was accounted for last began."""
    token_s: float = 0.0
    """Seconds for each of that step's tokens."""
    step_prompts_s: float = 0.0
    """That step's part of `prompts_s`."""

    def add(self, started_s: float, ended_s: float, tokens: int, prompt_tokens: int) -> None:
        """Account for a step.

        Args:
            started_s: When the device turned to it.
            ended_s: When its outcome was known.
            tokens: That it computed; at least one.
            prompt_tokens: Of those, what was prefilled, for the first time or again: all that was
                in chunks of more than one.
        """
        self.started_s = started_s
        self.token_s = max(0.0, ended_s - started_s) / tokens
        self.step_prompts_s = self.token_s * prompt_tokens
        self.prompts_s += self.step_prompts_s


@dataclass
class Spent:
    """Seconds of one sequence by phase; they add up to `until_s` less its arrival.

    While it decodes, `until_s` stays behind: see `catch_up`.
    """

    until_s: float
    """Up to here all is accounted for; at first the arrival."""
    has_begun: bool = False
    is_behind: bool = False
    """Sent back, and not yet computed again as far as it was: all that passes is "preempted"."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    prefill_wait_s: float = 0.0
    decode_s: float = 0.0
    decode_wait_s: float = 0.0
    """Of `decode_s`: other sequences' prompts."""
    preempted_s: float = 0.0
    _prompts_s: float = 0.0
    """The engine's sum at `until_s`."""

    def settle(
        self,
        now_s: float,
        steps: StepSums,
        *,
        own_prompt_tokens: int,
        has_token: bool,
    ) -> None:
        """Account for what passed until the end of a step with a chunk of this sequence.

        Args:
            now_s: The step's end.
            steps: The engine's sums, this step in them.
            own_prompt_tokens: Of the chunk, what was prefilled.
            has_token: Whether its first token was known before this step.
        """
        if not self.has_begun:
            self.has_begun = True
            self.queue_s = max(0.0, steps.started_s - self.until_s)
            self.until_s = max(self.until_s, steps.started_s)
            self._prompts_s = steps.prompts_s - steps.step_prompts_s
        passed_s = max(0.0, now_s - self.until_s)
        others_s = steps.prompts_s - self._prompts_s - steps.token_s * own_prompt_tokens
        others_s = min(max(0.0, others_s), passed_s)
        self.until_s, self._prompts_s = max(now_s, self.until_s), steps.prompts_s
        if self.is_behind:
            self.preempted_s += passed_s
        elif has_token:
            self.decode_s += passed_s
            self.decode_wait_s += others_s
        else:
            self.prefill_s += passed_s - others_s
            self.prefill_wait_s += others_s

    def catch_up(self, now_s: float, steps: StepSums, *, has_token: bool) -> None:
        """Account for what passed since: of a decode, or of one that ends amid a step or a wait."""
        passed_s = max(0.0, now_s - self.until_s)
        others_s = min(steps.prompts_s - self._prompts_s, passed_s)
        self.until_s, self._prompts_s = max(now_s, self.until_s), steps.prompts_s
        if self.is_behind:
            self.preempted_s += passed_s
        elif has_token:
            self.decode_s += passed_s
            self.decode_wait_s += others_s
        elif self.has_begun:
            self.prefill_s += passed_s
        else:
            self.queue_s += passed_s
