"""The transformers side of every comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from pathlib import Path


def reference_model(folder: Path) -> Any:
    """Load a checkpoint in transformers, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Return float32 [T, V] of one uncached pass."""
    return model(torch.tensor([token_ids])).logits[0]


@torch.no_grad()
def reference_greedy(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Continue greedily over transformers' own cache; end-of-sequence has no say."""
    output: list[int] = []
    step = model(torch.tensor([prompt]), use_cache=True)
    while True:
        output.append(int(step.logits[0, -1].argmax()))
        if len(output) == new_tokens:
            return output
        step = model(torch.tensor([output[-1:]]), past_key_values=step.past_key_values)
