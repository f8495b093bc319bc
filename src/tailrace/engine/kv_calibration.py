"""Scales of a float8 KV cache: the checkpoint's own, or measured once at start.

Where the checkpoint brings none, a text is run through the model with KV in the activations' dtype,
and the largest key and value of each layer give its scales:

    scale = HEADROOM * amax / 448

so that what is HEADROOM times as large as anything seen still fits, and what is larger saturates.
Headroom is cheap: float8 keeps its 3 bits of mantissa over 15 octaves, of which it costs one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tailrace.engine.device_kv import allocate_kv
from tailrace.errors import ModelError
from tailrace.kernels.attention_batch import AttentionBatch
from tailrace.kernels.kv_scales import KVScales
from tailrace.kernels.linear.float8 import FLOAT8_MAX
from tailrace.models.kv_scales import read_kv_scales
from tailrace.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from tailrace.kernels.triton_kernels import TritonKernels
    from tailrace.models.causal_lm import CausalLM

HEADROOM = 2.0
MAX_TOKENS = 1024

_UNIT = 16

CALIBRATION_TEXT = """\
The river rises in the hills above the town, and by the time it reaches the weir it carries the
water of eleven streams. In 1887 a mill stood here; its wheel was 6.4 metres across and turned four
pairs of stones. "We never stopped it," the miller's daughter wrote, "except on Sundays, and when
the ice came." Today the channel behind the wheel, the tailrace, leads the spent water back.

def merge(left: list[int], right: list[int]) -> list[int]:
    out, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            out.append(left[i]); i += 1
        else:
            out.append(right[j]); j += 1
    return out + left[i:] + right[j:]

Question: A tank holds 240 litres and drains at 8 litres a minute. How long until it is empty?
Answer: 240 / 8 = 30, so it takes 30 minutes. If another pipe adds 3 litres a minute, the tank loses
5 litres a minute, and 240 / 5 = 48 minutes pass.

{"id": 20317, "name": "sensor-7", "readings": [0.125, -3.5, 1e-6, 4096], "ok": true, "note": null}

Der Fluss fliesst durch das Tal, und im Winter friert er manchmal zu. La rivière traverse la
vallée avant de rejoindre la mer. El agua vuelve al cauce por un canal. 水は川へ戻る。
Вода возвращается в реку. 河水流回大海。 © 2026 — $19.99, 50 %, x² + y² = z²; see https://example.org/a?b=c#d.

User: Please summarise the report in one sentence.
Assistant: Output rose by 12 % in the second quarter, mostly because two of the five turbines were
replaced, while the cost per megawatt-hour fell to 31 euros.

Whereas the parties have agreed that the licence is granted for a period of ten years, and whereas
neither party may assign it without the other's written consent, the following terms shall apply:
(a) fees are due quarterly; (b) disputes are heard in the courts of the lessor's seat; (c) notice is
three months. aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ........ 0000000000000000 !?!?!?!? \t\t\t
"""


@dataclass(frozen=True)
class FoundScales:
    """One layer after the other, and where they come from, for people to read."""

    scales: list[KVScales]
    source: str

    def listed(self) -> str:
        """Name every scale, layer by layer."""
        return " ".join(f"{scales.k:.4g}/{scales.v:.4g}" for scales in self.scales)

    def describe(self) -> str:
        """Say the source and the range in one line."""
        ranges = ", ".join(
            f"{name} {min(values):.3g} to {max(values):.3g}"
            for name, values in (
                ("k", [scales.k for scales in self.scales]),
                ("v", [scales.v for scales in self.scales]),
            )
        )
        return f"{self.source}: {ranges}"


def find_scales(
    model: CausalLM, kernels: TritonKernels, folder: Path, load_format: str
) -> FoundScales:
    """Return the checkpoint's KV scales, or measure them.

    Args:
        model: On the device.
        kernels: The model's; KV is kept in their activations' dtype here.
        folder: The checkpoint's.
        load_format: "dummy" has neither scales nor, maybe, a tokenizer: it gets random ids.

    Raises:
        ModelError: Scales are there for some layers only, a layer's KV is not finite or all 0, or
            there is no tokenizer for the calibration text.
    """
    config = model.config
    if load_format != "dummy":
        known = read_kv_scales(folder, config.num_layers)
        if known is not None:
            return FoundScales(known, "the checkpoint's")
        ids = Tokenizer.load(folder).encode(CALIBRATION_TEXT, add_special_tokens=True)
        ids, what = ids[: min(MAX_TOKENS, config.max_position)], "the built-in text"
    else:
        count = min(MAX_TOKENS, config.max_position)
        ids = np.random.default_rng(0).integers(config.vocab_size, size=count).tolist()
        what = "random ids (dummy weights)"
    source = f"calibrated on {len(ids)} tokens of {what}, headroom {HEADROOM:g}"
    return FoundScales(calibrate(model, kernels, ids), source)


@torch.inference_mode()
def calibrate(model: CausalLM, kernels: TritonKernels, token_ids: list[int]) -> list[KVScales]:
    """Return each layer's scales, from the largest key and value that these tokens give.

    Raises:
        ModelError: A layer's keys or values are not finite, or all of them are 0.
    """
    count, device = len(token_ids), kernels.device
    blocks = -(-count // _UNIT)
    caches = allocate_kv(model, blocks, _UNIT, kernels.dtype, device)
    for pair in caches:
        for cache in pair:
            cache.zero_()  # the last block is not filled to its end
    positions = torch.arange(count, dtype=torch.int32, device=device)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        kv_lens=torch.tensor([count], dtype=torch.int32, device=device),
        block_tables=torch.arange(blocks, dtype=torch.int32, device=device).unsqueeze(0),
        positions=positions,
        slots=positions,
        max_query_len=count,
        max_kv_len=count,
    )
    model.forward(torch.tensor(token_ids, device=device), batch, caches)
    return [
        KVScales(_scale(k, layer, "keys"), _scale(v, layer, "values"))
        for layer, (k, v) in enumerate(caches)
    ]


def _scale(cache: Tensor, layer: int, what: str) -> float:
    peak = max(abs(float(bound)) for bound in torch.aminmax(cache))
    if not (math.isfinite(peak) and peak > 0):
        raise ModelError(
            f"layer {layer}'s {what} reach {peak:g} on the calibration text: no KV scale follows "
            "from that; use --kv-cache-dtype auto"
        )
    return HEADROOM * peak / FLOAT8_MAX
