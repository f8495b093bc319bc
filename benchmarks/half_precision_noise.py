"""What half precision alone does to a 4-bit model: no way of computing one comes nearer to another.

    PYTHONPATH=src:. python benchmarks/half_precision_noise.py [--windows 4] [--model MODEL]

SmolLM2 (or --model: a folder or a GGUF file) in 4 bits, groups of 64, to the nearest; transformers
on the CPU reads windows of 640 tokens of Python's own text, as `tailrace check-accuracy --gpus 0`
reads them in its decodes. Activations are bfloat16 or float16, the weights rounded to the same
(as a copy in half precision has them) or exact (as kernels over the 4 bits have them); each is
compared with float32, and the two with one another, by what check-accuracy compares.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tailrace.bench.corpus import python_text
from tailrace.models import gguf
from tailrace.text.tokenizer import Tokenizer
from tests.support.quantized import awq, plain_beside, write_quantized

WINDOW, GROUP = 640, 64
TOKEN_CHARACTERS = 8
"""More than any text has on the mean."""


class ExactLinear(nn.Module):
    """Multiplies with a float32 weight, and rounds what comes out."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T in the dtype of x."""
        return functional.linear(x.float(), self.weight).to(x.dtype)


def load(folder: Path, dtype: torch.dtype, *, exact_weights: bool) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = {
        name: layer.weight.data.clone()
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.endswith("_proj")
    }
    model.to(dtype)
    for name, weight in weights.items() if exact_weights else ():
        model.set_submodule(name, ExactLinear(weight))
    return model


@torch.inference_mode()
def log_probs(model: nn.Module, windows: list[list[int]]) -> Tensor:
    """Return natural-log probabilities [positions, V]."""
    logits = [model(torch.tensor([window])).logits[0].float() for window in windows]
    return torch.cat(logits).log_softmax(-1)


def tell(words: str, p: Tensor, q: Tensor) -> None:
    agreement = (p.argmax(-1) == q.argmax(-1)).double().mean()
    divergence = (p.exp() * (p - q)).sum(-1)
    print(
        f"{words:<42} {agreement:8.2%}  {divergence.mean():.6f} nats, {divergence.max():.4f} at "
        "worst",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--windows", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        quantised = Path(place) / "awq"
        write_quantized(gguf.resolve(arguments.model), quantised, awq(GROUP))
        folder = plain_beside(quantised)
        text = python_text()[: arguments.windows * WINDOW * TOKEN_CHARACTERS]
        ids = Tokenizer.load(folder).encode(text, add_special_tokens=False, parse_special=False)
        windows = [ids[at * WINDOW : (at + 1) * WINDOW] for at in range(arguments.windows)]
        reference = log_probs(load(folder, torch.float32, exact_weights=False), windows)
        for dtype in (torch.bfloat16, torch.float16):
            name = str(dtype).removeprefix("torch.")
            rounded = log_probs(load(folder, dtype, exact_weights=False), windows)
            tell(f"{name}, weights rounded, beside float32", reference, rounded)
            exact = log_probs(load(folder, dtype, exact_weights=True), windows)
            tell(f"{name}, weights exact, beside float32", reference, exact)
            tell(f"{name}, one beside the other", rounded, exact)


if __name__ == "__main__":
    main()
