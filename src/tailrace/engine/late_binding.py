"""When to choose the next step: late in the running one, so that who comes meanwhile is in it.

    bound at once    N: |---- x ----------------|   N+1: |-------|  N+2: |-- x's first chunk
    bound late       N: |---- x ---------- bind |   N+1: |-- x's first chunk

The prediction of the running step says how long there is to wait; a margin covers its error, and a
lead what choosing, preparing and queueing take. Where the device was seen to stand still the margin
grows by half, to the whole step if need be; each step without shrinks it a little.
"""

from __future__ import annotations

_LEAST_MARGIN = 0.15
_GROWTH = 1.5
_DECAY = 0.995
_IDLE_S = 0.0003
_IDLE_SHARE = 0.02
"""Idle for more than both was worth avoiding."""
_LEAD_DECAY = 0.98


class LateBinding:
    """Learns how late is early enough."""

    def __init__(self) -> None:
        self._margin = 0.25
        self._lead_s = 0.002

    @property
    def margin(self) -> float:
        """Share of a step's predicted time that is kept in hand."""
        return self._margin

    def due_s(self, began_s: float, predicted_s: float) -> float:
        """Return when to choose the step after one that began then."""
        return began_s + predicted_s * (1.0 - self._margin) - self._lead_s

    def observe(self, *, device_s: float, idle_s: float, host_s: float) -> None:
        """Learn from a step that is done.

        Args:
            device_s: What the device took for it.
            idle_s: What the device stood still before it.
            host_s: What choosing, preparing and queueing it took.
        """
        self._lead_s = max(host_s, _LEAD_DECAY * self._lead_s)
        if idle_s > max(_IDLE_S, _IDLE_SHARE * device_s):
            self._margin = min(1.0, self._margin * _GROWTH)
        else:
            self._margin = max(_LEAST_MARGIN, self._margin * _DECAY)
