"""How long a step takes, from what is in it: fitted at warm-up, followed while serving.

    seconds = base + token x max(0, rows - free_rows) + attention x prompt pairs
                   + decode x decodes + kv x positions that decodes attend to

Each term is one resource. A step reads all weights once (`base`, with what any step costs beside
it), and its matrix products hide behind that reading up to `free_rows` rows; beyond, each row adds
its arithmetic (a roofline, written as its floor plus what sticks out). Prompts' attention is
arithmetic over pairs of positions; decodes' attention is reading KV; and a decode has a cost of its
own (its logits and its draw).

Where prompts go by a copy of the weights of their own, a step reads either copy or both, and rows
of one kind hide behind their own copy's reading alone:

    seconds = base + token x max(0, prompt tokens - free_rows) + attention, decode and kv as above
                   + late token x max(0, prompt tokens - 2 x free_rows)
                   + prompts, if it has any + decodes, if it has any + crowd x max(0, decodes - 32)

Where both kinds go at once (phase_overlap.py), a step of both takes less than its parts. There is
no term for that: `base`, which such a step pays once and its parts would pay twice, takes it up as
long as a small share of the shorter part is saved (docs/steps.md).

Given `free_rows` the form is linear, so the fit is least squares over non-negative coefficients, of
relative errors, for each of a few `free_rows`. Terms that the measured steps do not tell apart stay
0.

While serving, a Kalman filter follows: the coefficients drift, all of them together (a machine that
gets slower gets slower at everything) and a little each on its own (what the fit missed). One
measurement is believed within bounds only, so that a compilation or a stall moves little.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from tailrace.errors import EngineError
from tailrace.types import FEW_DECODES, StepCosts, attended

if TYPE_CHECKING:
    from collections.abc import Sequence

_FREE_ROWS = (0, 8, 16, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512)
_APART_BY = 1.5
"""What a term depends on must differ by this factor between two measured steps."""
_LEAST_CURVED = 4
"""Sizes of prompts' steps that tell where their slope changes."""
_STALLED = 0.1
"""A measured step off by more than this share of it was disturbed rather than noisy."""
_REWEIGHTED = 4
_RIDGE = 1e-13
"""Of a term's square: columns that are alike make no error of it."""
_NOISE = 0.1
"""Standard deviation of one step around its prediction, as a share of it."""
_MOST_SURPRISE = 0.3
"""A step off by more counts as off by this share."""
_LEAST_STEP = 0.02
"""A step is judged as if it took at least this share of the large one."""
_DRIFT = 0.1
"""How much of a lasting change one step teaches, about."""
_TOGETHER = 0.3
"""Uncertainty of the machine's speed, as a share."""
_APART = 0.15
"""Uncertainty of one term, as a share of itself; and a tenth of it as a share of all terms."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step computes; see `StepCosts.predict` for the terms."""

    prefill_tokens: int = 0
    prefill_context: int = 0
    decodes: int = 0
    decode_context: int = 0

    @property
    def rows(self) -> int:
        """All rows of the model's matrix products."""
        return self.prefill_tokens + self.decodes

    def with_chunk(self, start: int, tokens: int) -> StepLoad:
        """Return a load with a prompt's chunk added: so many tokens, from position `start`."""
        return replace(
            self,
            prefill_tokens=self.prefill_tokens + tokens,
            prefill_context=self.prefill_context + attended(start, start + tokens),
        )

    def seconds(self, costs: StepCosts) -> float:
        """Return what it takes."""
        return costs.predict(
            self.prefill_tokens, self.prefill_context, self.decodes, self.decode_context
        )

    def terms(self, free_rows: int, *, prompts_apart: bool = False) -> list[float]:
        """Return what the coefficients are multiplied with: five, or nine with prompts apart."""
        beside = 0 if prompts_apart else self.decodes
        terms = [
            1.0,
            max(0, self.prefill_tokens + beside - free_rows),
            self.prefill_context,
            self.decodes,
            self.decode_context,
        ]
        if prompts_apart:
            crowd = max(0, self.decodes - FEW_DECODES)
            late = max(0, self.prefill_tokens - 2 * free_rows)
            terms += [float(self.prefill_tokens > 0), float(self.decodes > 0), crowd, late]
        return terms


def fit(samples: Sequence[tuple[StepLoad, float]], *, prompts_apart: bool = False) -> StepCosts:
    """Fit the coefficients to measured steps (load, seconds), by least relative squares.

    Args:
        samples: What was measured.
        prompts_apart: Whether prompts go by a copy of the weights of their own.

    Raises:
        EngineError: There is no step that took any time.
    """
    taken = [(load, seconds) for load, seconds in samples if load.rows and seconds > 0.0]
    if not taken:
        raise EngineError("no step was measured: its time cannot be fitted")
    loads = [load for load, _ in taken]
    allowed = _told_apart(loads, prompts_apart=prompts_apart)
    seconds = np.array([seconds for _, seconds in taken])
    most_rows = max(load.prefill_tokens if prompts_apart else load.rows for load in loads)
    fits = []
    for free_rows in _FREE_ROWS:
        if free_rows == 0 or free_rows < most_rows:
            terms = np.array([load.terms(free_rows, prompts_apart=prompts_apart) for load in loads])
            found, loss = _robust(terms / seconds[:, None], allowed)
            fits.append((loss, free_rows, found))
    _, free_rows, found = min(fits, key=lambda fitted: fitted[0])
    return _costs(found, free_rows, prompts_apart=prompts_apart)


def _told_apart(loads: Sequence[StepLoad], *, prompts_apart: bool) -> list[int]:
    """Return the terms that the steps can tell from the others; the rest stays 0 until learnt.

    A few prompts from their first token on have pairs that grow with their tokens: fitted to those,
    a stall of the machine would become seconds of attention for a long prompt.
    """
    prefills = [load for load in loads if load.prefill_tokens]
    decodes = [load for load in loads if load.decodes]
    depths = [load.prefill_context / load.prefill_tokens for load in prefills]
    counts = [load.decodes for load in decodes]
    contexts = [load.decode_context / load.decodes for load in decodes]
    rows = [load.rows for load in loads]

    def varies(values: Sequence[float]) -> bool:
        return bool(values) and max(values) > _APART_BY * min(values)

    deep = any(load.prefill_context > load.prefill_tokens**2 for load in prefills)
    attention = (deep and varies(depths), varies(counts), varies(contexts))
    if not prompts_apart:
        told = [True, varies(rows), *attention]
    else:
        both = [load for load in prefills if load.decodes]
        is_some = bool(both) and len(prefills) > len(both) and len(decodes) > len(both)
        tokens = [load.prefill_tokens for load in prefills]
        few = [count for count in counts if count <= FEW_DECODES]
        crowds = varies(few) and any(count > _APART_BY * FEW_DECODES for count in counts)
        # Without steps of each kind and of both, what all steps cost is part of either's.
        told = [is_some, varies(tokens), *attention, bool(prefills), bool(decodes), crowds]
        told.append(len(set(tokens)) >= _LEAST_CURVED)
    return [term for term, is_told in enumerate(told) if is_told]


def _robust(rows: np.ndarray, allowed: Sequence[int]) -> tuple[np.ndarray, float]:
    """Solve `rows @ x = 1` under Huber's loss, x >= 0; return x and the loss.

    A step that was stalled counts by how far it is off, not by the square of it.
    """
    weights = np.ones(len(rows))
    for _ in range(_REWEIGHTED):
        found = _non_negative(rows * weights[:, None], weights, allowed)
        off = np.abs(rows @ found - 1.0)
        weights = np.sqrt(np.minimum(1.0, _STALLED / np.maximum(off, 1e-12)))
    inside = np.minimum(off, _STALLED)
    return found, float(np.sum(inside * (2 * off - inside)))


def _non_negative(rows: np.ndarray, targets: np.ndarray, allowed: Sequence[int]) -> np.ndarray:
    """Solve `rows @ x = targets` in least squares, x >= 0.

    Only the columns `allowed` may have a part.

    With nine unknowns every set of those that are not 0 can be tried: the best feasible one is
    the exact solution. Sets of one size are solved at once. Columns are scaled first: seconds a
    pair are 1e-9.
    """
    scale = np.maximum(rows.max(axis=0), 1e-300)
    scaled = rows / scale
    best, best_residual = np.zeros(rows.shape[1]), float(targets @ targets)
    gram, moments = scaled.T @ scaled, scaled.T @ targets
    for size in range(1, len(allowed) + 1):
        sets = np.array(list(combinations(allowed, size)))
        squares = gram[sets[:, :, None], sets[:, None, :]] + _RIDGE * np.eye(size)
        found = np.linalg.solve(squares, moments[sets][:, :, None])[:, :, 0]
        off = np.einsum("nks,ks->kn", scaled[:, sets], found) - targets
        residuals = np.where(found.min(axis=1) >= 0.0, np.sum(off**2, axis=1), np.inf)
        # More terms must earn their place: noise is always fitted a little better with more.
        winner = int(residuals.argmin())
        if residuals[winner] < best_residual * 0.999 - 1e-12:
            best, best_residual = np.zeros(rows.shape[1]), float(residuals[winner])
            best[sets[winner]] = found[winner]
    return np.asarray(best / scale)


def _costs(coefficients: np.ndarray, free_rows: int, *, prompts_apart: bool) -> StepCosts:
    base, token, attention, decode, kv, *apart = (float(value) for value in coefficients)
    prompts, decodes, crowd, late = apart or (0.0,) * 4
    return StepCosts(
        base_s=base,
        token_s=token,
        free_rows=free_rows,
        attention_s=attention,
        decode_s=decode,
        kv_s=kv,
        prompts_apart=prompts_apart,
        prompts_s=prompts,
        decodes_s=decodes,
        crowd_s=crowd,
        late_token_s=late,
    )


def _coefficients(costs: StepCosts) -> list[float]:
    """Return them in the order of `StepLoad.terms`."""
    common = [costs.base_s, costs.token_s, costs.attention_s, costs.decode_s, costs.kv_s]
    apart = [costs.prompts_s, costs.decodes_s, costs.crowd_s, costs.late_token_s]
    return common + apart if costs.prompts_apart else common


class StepTimeModel:
    """Predicts steps and learns from them; without a fit it does neither.

    The state is what each term contributes to a large step of the warm-up, in seconds, so that the
    filter's numbers are of one size.
    """

    def __init__(self) -> None:
        self._costs: StepCosts | None = None
        self._state = np.zeros(0)
        self._covariance = np.zeros((0, 0))
        self._unit = np.ones(0)
        """Of each term, how much of it the large step has."""

    @property
    def costs(self) -> StepCosts | None:
        """The coefficients as learnt up to now."""
        return self._costs

    def fit(
        self, samples: Sequence[tuple[StepLoad, float]], *, prompts_apart: bool = False
    ) -> StepCosts:
        """Begin with what warm-up measured: (load, seconds) a step; see `fit`."""
        costs = fit(samples, prompts_apart=prompts_apart)
        terms = np.array(
            [load.terms(costs.free_rows, prompts_apart=prompts_apart) for load, _ in samples]
        )
        self.start(costs, np.maximum(terms.max(axis=0), 1.0))
        return costs

    def start(self, costs: StepCosts, large_step: np.ndarray) -> None:
        """Begin with known coefficients; `large_step` has the terms of a large step, none 0."""
        self._costs, self._unit = costs, large_step
        self._state = large_step * np.array(_coefficients(costs))
        self._covariance = self._doubt()

    def predict(self, load: StepLoad) -> float | None:
        """Return the seconds of a step; None where nothing was fitted."""
        return None if self._costs is None else load.seconds(self._costs)

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from one step; nothing where nothing was fitted."""
        costs = self._costs
        if costs is None or not load.rows or seconds <= 0.0:
            return
        expected = load.seconds(costs)
        # Else a step that was predicted to take nothing could never teach that it takes something.
        scale = max(expected, _LEAST_STEP * float(self._state.sum()))
        terms = load.terms(costs.free_rows, prompts_apart=costs.prompts_apart)
        features = np.array(terms) / self._unit
        most = _MOST_SURPRISE * scale
        surprise = min(max(seconds - expected, -most), most)
        self._drift()
        spread = self._covariance @ features
        gain = spread / (features @ spread + (_NOISE * scale) ** 2)
        self._state = np.maximum(self._state + gain * surprise, 0.0)
        self._covariance = self._covariance - np.outer(gain, spread)
        self._costs = _costs(
            self._state / self._unit, costs.free_rows, prompts_apart=costs.prompts_apart
        )

    def _drift(self) -> None:
        """Grow the uncertainty by a step's drift, up to what it was at first."""
        doubt = self._doubt()
        grown = self._covariance + (_DRIFT * _NOISE / _TOGETHER) ** 2 * doubt
        excess = np.sqrt(np.minimum(1.0, doubt.diagonal() / grown.diagonal()))
        self._covariance = grown * np.outer(excess, excess)

    def _doubt(self) -> np.ndarray:
        apart = _APART * self._state + 0.1 * _APART * self._state.sum()
        return np.asarray(_TOGETHER**2 * np.outer(self._state, self._state) + np.diag(apart**2))
