"""What a float8 KV cache costs in accuracy, on SmolLM2's real weights and a CPU.

    python benchmarks/kv_accuracy.py --text FILE [--positions 2048] [--window 512]

The reference kernels run windows of real text twice, with float32 weights: once with KV in float32,
once in float8 (e4m3) by scales calibrated as the server does (`engine/kv_calibration`): a layer's
largest key and value on the built-in text. Printed: how often both would choose the same token, the
mean KL divergence in nats, and both perplexities.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tailrace.engine.kv_calibration import CALIBRATION_TEXT, HEADROOM
from tailrace.kernels.attention_batch import AttentionBatch
from tailrace.kernels.kv_scales import KVScales
from tailrace.kernels.linear.float8 import FLOAT8, FLOAT8_MAX
from tailrace.kernels.torch_kernels import TorchKernels
from tailrace.models import gguf
from tailrace.models.loader import load_model
from tailrace.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tailrace.models.causal_lm import CausalLM

UNIT, CHUNK = 16, 128


@dataclass
class Run:
    """One text through the model, chunk by chunk, in a cache of its own."""

    model: CausalLM
    dtype: torch.dtype
    scales: list[KVScales] | None = None

    def logits(self, ids: list[int]) -> torch.Tensor:
        config, blocks = self.model.config, -(-len(ids) // UNIT)
        heads, dim = config.num_kv_heads, config.head_dim
        self.caches = [
            (
                torch.zeros(blocks, heads, dim, UNIT).to(self.dtype),
                torch.zeros(blocks, heads, UNIT, dim).to(self.dtype),
            )
            for _ in range(config.num_layers)
        ]
        rows = []
        for low in range(0, len(ids), CHUNK):
            high = min(low + CHUNK, len(ids))
            positions = torch.arange(low, high)
            batch = AttentionBatch(
                query_starts=torch.tensor([0, high - low], dtype=torch.int32),
                kv_lens=torch.tensor([high], dtype=torch.int32),
                block_tables=torch.arange(blocks, dtype=torch.int32).unsqueeze(0),
                positions=positions,
                slots=positions,
                max_query_len=high - low,
                max_kv_len=high,
            )
            part = torch.tensor(ids[low:high])
            hidden = self.model.forward(part, batch, self.caches, self.scales)
            rows.append(self.model.logits(hidden))
        return torch.cat(rows).log_softmax(-1)

    def calibrated(self, ids: list[int]) -> list[KVScales]:
        self.logits(ids)
        peaks = [[float(cache.abs().max()) for cache in pair] for pair in self.caches]
        return [KVScales(*(HEADROOM * peak / FLOAT8_MAX for peak in pair)) for pair in peaks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--window", type=int, default=512)
    arguments = parser.parse_args()
    folder = gguf.resolve("smollm2")
    model = load_model(folder, dtype="float32", kernels=TorchKernels())
    tokenizer = Tokenizer.load(folder)
    exact = Run(model, torch.float32)
    known = tokenizer.encode(CALIBRATION_TEXT, add_special_tokens=True)
    float8 = Run(model, FLOAT8, exact.calibrated(known))
    text = arguments.text.read_text(encoding="utf-8")[: 8 * arguments.positions]
    ids = tokenizer.encode(text, add_special_tokens=False)[: arguments.positions]
    same, divergence, surprise, count = 0, 0.0, [0.0, 0.0], 0
    for low in range(0, len(ids), arguments.window):
        window = ids[low : low + arguments.window]
        truth, found = exact.logits(window), float8.logits(window)
        same += int((truth.argmax(-1) == found.argmax(-1)).sum())
        divergence += float((truth.exp() * (truth - found)).sum())
        following = torch.tensor(window[1:])[:, None]
        for index, rows in enumerate((truth, found)):
            surprise[index] -= float(rows[:-1].gather(1, following).sum())
        count += len(window)
    windows = -(-len(ids) // arguments.window)
    perplexities = [math.exp(total / (count - windows)) for total in surprise]
    print(
        f"{count} positions: the same first choice at {100 * same / count:.2f} %, mean KL "
        f"{divergence / count:.5f}, perplexity {perplexities[0]:.3f} and {perplexities[1]:.3f} "
        f"in float8 ({100 * (perplexities[1] / perplexities[0] - 1):+.2f} %)"
    )


if __name__ == "__main__":
    main()
