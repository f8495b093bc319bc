"""What a prompt's products may be rounded to: formats of the prefill's weights, by their accuracy.

    PYTHONPATH=src:. python benchmarks/prefill_formats.py [--device cuda] [--model MODEL]
        [--plain] [--positions 20480] [--only NAME ...]

Each format rounds the weights once and the rows as they come, in float32: the values are those that
tensor cores would multiply, the sums are not rounded. All are compared with the same checkpoint
unrounded, by what `tailrace check-accuracy` compares (`engine/accuracy`), the head left as it is.
--model is a folder, a GGUF file, or smollm2, the default. Plain weights are rounded to 4 bits first
(groups of 64, to the nearest), unless --plain asks for them as they are. A minute a format and
thousand positions on two cores, so a GPU is the place for it. A format is named by what it does:

    w:channel x:row                 int8, a scale an output and a scale a row
    w:exact x:group64               code less zero, an integer; rows by groups of 64 inputs
    w:channel x:row had512          both rotated by blocks of a Hadamard matrix before rounding
    w:channel x:row smooth0.5       inputs scaled one by one, by calibration on another text
    w:channel x:row but down,o      those layers in bfloat16

What is measured on 135M weights proves nothing about another checkpoint: `check-accuracy` does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from tailrace.bench.corpus import python_text
from tailrace.engine.accuracy import WINDOW_TOKENS, Bound, cut_windows
from tailrace.engine.runner import allocate_kv
from tailrace.kernels.attention_batch import AttentionBatch
from tailrace.kernels.linear.float8 import quantize_channels
from tailrace.kernels.linear.float8_rows import quantize_rows
from tailrace.kernels.linear.int8 import hadamard
from tailrace.kernels.linear.weight import plain
from tailrace.kernels.torch_kernels import TorchKernels
from tailrace.models import gguf
from tailrace.models.config import load_config
from tailrace.models.loader import load_model
from tailrace.text.tokenizer import Tokenizer
from tests.support.quantized import awq, write_quantized

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT_CHARACTERS = 600_000
CALIBRATION_CHARACTERS = 30_000
"""Of the text's end, which no window reaches."""
WINDOWS_AT_ONCE = 4
"""Of their reference, the distributions are held: 200 MB each."""
CHUNK, UNIT = 512, 16
"""Tokens of a step, and of a block of the cache."""
GROUP = 64
"""Of the 4 bits: 128 does not divide SmolLM2's 576 inputs."""
KINDS = ("qkv", "o", "gate_up", "down")

FORMATS = (
    "w:bf16 x:bf16",
    "w:fp8 x:fp8",
    "w:channel x:row",
    "w:channel x:exact",
    "w:exact x:row",
    "w:channel x:group128",
    "w:channel x:group64",
    "w:exact x:group128",
    "w:exact x:group64",
    "w:exact x:group32",
    "w:channel x:row smooth0.5",
    "w:channel x:row smooth0.75",
    "w:channel x:row had64",
    "w:channel x:row had128",
    "w:channel x:row had512",
    "w:channel x:group64 had64",
    "w:channel x:row but down",
    "w:channel x:row but o",
    "w:channel x:row but down,o",
    "w:channel x:row but qkv",
    "w:channel x:row but gate_up",
    "w:channel x:row but down,o,qkv",
)


@dataclass(frozen=True)
class Format:
    """What a layer's weight and rows are rounded to."""

    weight: str = "exact"
    rows: str = "exact"
    rotation: int = 0
    smoothing: float = 0.0
    but: tuple[str, ...] = ()

    @classmethod
    def parse(cls, name: str) -> Format:
        words, _, but = name.partition(" but ")
        found: dict[str, Any] = {"but": tuple(filter(None, but.split(",")))}
        for word in words.split():
            for start, key, kind in (
                ("w:", "weight", str), ("x:", "rows", str),
                ("had", "rotation", int), ("smooth", "smoothing", float),
            ):  # fmt: skip
                if word.startswith(start):
                    found[key] = kind(word.removeprefix(start))
        return cls(**found)


HALF = Format("bf16", "bf16")


class StudiedLinear:
    """x @ weight.T + bias in a format that can be changed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight_OI, self.bias_O = weight, bias
        self.kind = ""
        self.peaks_I = torch.zeros(weight.shape[1], device=weight.device)
        self.calibrates = False
        self.use(Format())
        self.name, self.nbytes = "studied", weight.nbytes

    def use(self, form: Format) -> None:
        form = HALF if self.kind in form.but else form
        self.form = form
        self.smooth_I = None
        weight = self.weight_OI
        if form.smoothing:
            reach = weight.abs().amax(0).clamp(min=1e-5)
            share = form.smoothing
            self.smooth_I = self.peaks_I.clamp(min=1e-5) ** share / reach ** (1 - share)
            weight = weight * self.smooth_I
        if form.rotation:
            weight = rotated(weight, form.rotation)
        self.used_OI = round_weight(weight, form.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.calibrates:
            self.peaks_I = torch.maximum(self.peaks_I, x.abs().amax(0))
        if self.smooth_I is not None:
            x = x / self.smooth_I
        if self.form.rotation:
            x = rotated(x, self.form.rotation)
        return functional.linear(round_rows(x, self.form.rows), self.used_OI, self.bias_O)


def round_weight(weight: torch.Tensor, form: str) -> torch.Tensor:
    if form == "exact":
        return weight
    if form == "bf16":
        return weight.bfloat16().float()
    if form == "fp8":
        return quantize_channels(weight).dequantize()
    if form == "channel":
        return round_int8(weight)
    raise ValueError(form)


def round_rows(x: torch.Tensor, form: str) -> torch.Tensor:
    if form == "exact":
        return x
    if form == "bf16":
        return x.bfloat16().float()
    if form == "fp8":
        return quantize_rows(x).dequantize()
    if form == "row":
        return round_int8(x)
    if form.startswith("group"):
        group = int(form.removeprefix("group"))
        width = x.shape[1]
        padded = functional.pad(x, (0, -width % group))
        return round_int8(padded.view(-1, group)).view_as(padded)[:, :width]
    raise ValueError(form)


def round_int8(x: torch.Tensor) -> torch.Tensor:
    """Round to multiples of 1/127 of the largest of each last dimension."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
    return (x / scale).round_() * scale


def rotated(x: torch.Tensor, most: int) -> torch.Tensor:
    """Multiply blocks of the last dimension by a Hadamard matrix, the largest that divides it."""
    block = min(x.shape[-1] & -x.shape[-1], most)
    matrix = hadamard(block).to(x.device) * block**-0.5
    return (x.reshape(-1, block) @ matrix).view_as(x)


class StudiedKernels(TorchKernels):
    """The reference kernels on any device, with linear layers as above."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.layers: list[StudiedLinear] = []

    def pack_linear(self, weight: Any, bias: torch.Tensor | None, _dtype: str) -> StudiedLinear:
        bias = None if bias is None else bias.to(self.device, torch.float32)
        wide = plain(weight).to(self.device, torch.float32).contiguous()
        self.layers.append(StudiedLinear(wide, bias))
        return self.layers[-1]


class Reader:
    """Reads windows of text, chunk by chunk, over one cache."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = model.kernels.device
        self.caches = [
            (keys.to(self.device), values.to(self.device))
            for keys, values in allocate_kv(model, WINDOW_TOKENS // UNIT, UNIT)
        ]

    @torch.inference_mode()
    def read(self, token_ids: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield where each chunk starts, and its natural-log probabilities, float32 [rows, V]."""
        for start in range(0, len(token_ids), CHUNK):
            ids = torch.tensor(token_ids[start : start + CHUNK], device=self.device)
            hidden = self.model.forward(ids, self._batch(start, len(ids)), self.caches)
            yield start, self.model.logits(hidden).log_softmax(-1)

    def _batch(self, start: int, rows: int) -> AttentionBatch:
        places = torch.arange(start, start + rows, device=self.device)

        def here(values: Any) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        return AttentionBatch(
            query_starts=here([0, rows]),
            kv_lens=here([start + rows]),
            block_tables=here([range(WINDOW_TOKENS // UNIT)]),
            positions=places,
            slots=places,
            max_query_len=rows,
            max_kv_len=start + rows,
        )


def set_format(model: Any, form: Format) -> None:
    for layer in model.layers:
        for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
            linear.use(form)


def name_layers(model: Any) -> None:
    for layer in model.layers:
        linears = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
        for kind, linear in zip(KINDS, linears, strict=True):
            linear.kind = kind


def calibrate(kernels: StudiedKernels, model: Any, ids: list[int]) -> None:
    for linear in kernels.layers:
        linear.calibrates = True
    for low in range(0, len(ids), WINDOW_TOKENS):
        for _ in Reader(model).read(ids[low : low + WINDOW_TOKENS]):
            pass
    for linear in kernels.layers:
        linear.calibrates = False


@torch.inference_mode()
def study(model: Any, windows: list[list[int]], names: list[str]) -> dict[str, dict[str, float]]:
    """Return for each format the sums of what `engine/accuracy` averages, over all windows."""
    sums = {name: {"agreed": 0.0, "divergence": 0.0, "positions": 0} for name in names}
    reader = Reader(model)
    for low in range(0, len(windows), WINDOWS_AT_ONCE):
        some = windows[low : low + WINDOWS_AT_ONCE]
        set_format(model, Format())
        references = [torch.cat([p for _, p in reader.read(window[:-1])]) for window in some]
        for name in names:
            found = sums[name]
            set_format(model, Format.parse(name))
            for window, reference in zip(some, references, strict=True):
                for start, q in reader.read(window[:-1]):
                    p = reference[start : start + len(q)]
                    found["agreed"] += int((q.argmax(-1) == p.argmax(-1)).sum())
                    costs = q.sub_(p).mul_(p.exp())
                    found["divergence"] -= float(costs.sum(-1).double().sum())
                    found["positions"] += len(q)
            print(f"  {low + len(some)}/{len(windows)} {name}: "
                  f"{found['agreed'] / found['positions']:.3%} "
                  f"{found['divergence'] / found['positions']:.6f} ({time.strftime('%H:%M:%S')})",
                  flush=True)  # fmt: skip
    return sums


def print_table(sums: dict[str, dict[str, float]]) -> None:
    bound = Bound()
    print(f"\n| format | same likeliest token | mean KL, nats | bound |\n|{'---|' * 4}")
    for name, found in sums.items():
        agreement = found["agreed"] / found["positions"]
        divergence = found["divergence"] / found["positions"]
        kept = agreement >= bound.agreement and divergence <= bound.divergence
        print(f"| {name} | {agreement:.2%} | {divergence:.5f} | {'kept' if kept else 'missed'} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--positions", type=int, default=20_480)
    parser.add_argument("--only", nargs="+", default=list(FORMATS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder = gguf.resolve(arguments.model)
    with tempfile.TemporaryDirectory() as scratch:
        if load_config(folder).quantization is None and not arguments.plain:
            folder = write_quantized(folder, Path(scratch) / "awq", awq(GROUP))
        kernels = StudiedKernels(arguments.device)
        model = load_model(folder, dtype="float32", kernels=kernels)
        tokenizer = Tokenizer.load(folder)
    name_layers(model)
    text = python_text()[:TEXT_CHARACTERS]

    def tokens(words: str) -> list[int]:
        return tokenizer.encode(words, add_special_tokens=False, parse_special=False)

    if any(Format.parse(name).smoothing for name in arguments.only):
        calibrate(kernels, model, tokens(text[-CALIBRATION_CHARACTERS:])[:WINDOW_TOKENS])
    windows = cut_windows(tokens(text[:-CALIBRATION_CHARACTERS]), arguments.positions)
    sums = study(model, windows, arguments.only)
    print(f"\n{arguments.model}{', as it is' if arguments.plain else ' in 4 bits'}, "
          f"{arguments.positions} positions")  # fmt: skip
    print_table(sums)
    if arguments.out:
        arguments.out.write_text(json.dumps(sums))


if __name__ == "__main__":
    main()
