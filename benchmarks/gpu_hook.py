"""The attention of prompts in transformers on a GPU: ours, SDPA's and FlashAttention's.

    python benchmarks/gpu_hook.py [--out DIR] [--prefill-attention triton]

First ours and SDPA's are compared with the formula in float64, over padding, prefixes and the
layouts of models and caches, NaN in every key that is not real; where ours errs by more than twice
SDPA's error, or a small Qwen2 gives other logits, nothing is timed; where a timed call was not
ours, nothing is told. Then, in the shape of
Qwen2.5-7B (28 query heads, 4 KV heads, 128 dimensions, bfloat16), whole prompts of 512, 2048 and
6144 tokens, one and four at a time: the attention of one layer as transformers calls it (medians
of CUDA events, a cold L2), and the whole pass of a model of four such layers. FlashAttention is
`fa3-fwd`, `flash-attn` or vLLM's copy of FlashAttention 3 (its site on PYTHONPATH), called with the
same tensors, where one can be imported.
Pairs of query and key make 4 x 128 operations a head; a causal prompt of n has n (n + 1) / 2.
"""

from __future__ import annotations

import argparse
import importlib
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import transformers
from gpu_attention import time_ms
from transformers import AutoModelForCausalLM, Qwen2Config

from tailrace.integrations import transformers as hook
from tailrace.kernels.paged_attention.contiguous import Spans, attend
from tailrace.kernels.paged_attention.prefill_kernels import hopper_shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HEADS, KV_HEADS, DIM, LAYERS = 28, 4, 128, 4
PASS_LEAD_MS = 20.0
"""Longer than the host takes to queue a pass, so that device time alone is told."""
LENGTHS, BATCHES = (512, 2048, 6144), (1, 4)
PADDINGS = {
    "whole": Spans.unpadded(2, 300, 0),
    "left": Spans(300, 0, (0, 133), (300, 300)),
    "right": Spans(300, 0, (0, 0), (300, 77)),
    "prefix": Spans.unpadded(2, 129, 1204),
    "prefix, left": Spans(129, 1204, (0, 1250), (1333, 1333)),
}
LAYER = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True)
# Four layers of Qwen2.5-7B; the vocabulary is small, for a prompt needs one row of logits.
SHAPE = Qwen2Config(
    vocab_size=1024, hidden_size=3584, intermediate_size=18944, num_hidden_layers=LAYERS,
    num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=8192,
)  # fmt: skip
SMALL = Qwen2Config(
    vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=8192,
)  # fmt: skip


def random(batch: int, heads: int, tokens: int, *, token_major: bool) -> Tensor:
    """Return [B, H, T, D] as a cache lays it out, or as a projection does."""
    shape = (batch, tokens, heads, DIM) if token_major else (batch, heads, tokens, DIM)
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    return x.transpose(1, 2) if token_major else x


def masks_of(spans: Spans) -> tuple[Tensor, Tensor]:
    """Return the mask [B, 1, Q, T] that the spans stand for, and which keys [B, T] are real."""
    keys = torch.arange(spans.query_offset + spans.query_length, device="cuda")
    firsts, ends = (torch.tensor(x, device="cuda")[:, None] for x in (spans.firsts, spans.ends))
    is_real = (keys >= firsts) & (keys < ends)
    return (is_real[:, None] & (keys <= keys[spans.query_offset :, None]))[:, None], is_real


def error(found: Tensor, truth: Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def wrong_attention(*, by_hopper: bool) -> list[str]:
    """Return the cases in which ours is further from the truth than twice SDPA's distance."""
    wrong = []
    for name, spans in PADDINGS.items():
        for token_major in (False, True):
            stop = spans.query_offset + spans.query_length
            q = random(2, HEADS, spans.query_length, token_major=True)
            k, v = (random(2, KV_HEADS, stop, token_major=token_major) for _ in range(2))
            mask, is_key = masks_of(spans)
            is_real = is_key[:, spans.query_offset :]
            wide = [x.double().repeat_interleave(HEADS // x.shape[1], 1) for x in (q, k, v)]
            scores = (wide[0] @ wide[1].transpose(2, 3) * DIM**-0.5).masked_fill(~mask, -torch.inf)
            truth = (scores.softmax(-1) @ wide[2]).transpose(1, 2)[is_real]
            sdpa, _ = hook.sdpa_attention_forward(LAYER, q, k, v, mask)
            for x in (k, v):
                x.masked_fill_(~is_key[:, None, :, None], torch.nan)
            capability = torch.cuda.get_device_capability()
            shape = hopper_shapes(DIM)[0] if by_hopper else None
            ours = attend(q, k, v, spans, scale=DIM**-0.5, capability=capability, shape=shape)
            mine, theirs = error(ours[is_real], truth), error(sdpa[is_real], truth)
            if not mine < 2 * theirs:
                wrong.append(f"{name}, token_major={token_major}: {mine:.2e}, SDPA {theirs:.2e}")
    return wrong


def model_of(config: Qwen2Config) -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@torch.no_grad()
def wrong_logits() -> list[str]:
    """Return the prompts on which a small Qwen2 in ours and in SDPA's give other logits.

    In bfloat16 both are compared with the model in float32: ours may be twice as far as SDPA's.
    """
    model = model_of(SMALL)
    exact = model_of(SMALL).float()
    wrong = []
    for length in (65, 700, 3000):
        ids = torch.randint(0, 1024, (2, length), device="cuda")
        mask = torch.ones_like(ids)
        mask[0, : length // 3] = 0
        truth = exact(ids, attention_mask=mask).logits.double()[mask.bool()]
        errors = {}
        for name in ("tailrace", "sdpa"):
            model.set_attn_implementation(name)
            found = model(ids, attention_mask=mask).logits
            errors[name] = error(found[mask.bool()], truth)
        if not errors["tailrace"] < 2 * errors["sdpa"]:
            wrong.append(f"logits of {length} tokens: {errors}")
    if hook.fallbacks():
        wrong.append(f"calls that were not ours: {hook.fallbacks()}")
    return wrong


def flash_attention() -> tuple[str, Callable[..., Tensor]] | None:
    """Return a FlashAttention that can be imported, and its name."""
    for name in ("fa3_fwd_interface", "flash_attn_interface", "flash_attn"):
        try:
            return name, importlib.import_module(name).flash_attn_func
        except ImportError as problem:
            print(f"{name}: {problem}")
    try:
        varlen = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    except ImportError as problem:
        print(f"vllm_flash_attn: {problem}")
        return None
    return "FlashAttention 3 (vLLM's)", partial(flash_by_lengths, varlen.flash_attn_varlen_func)


def flash_by_lengths(
    varlen: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *, causal: bool
) -> Tensor:
    """Call the form that takes rows of many lengths with [B, T, H, D] of one length."""
    batch, length = q.shape[:2]
    starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
    out = varlen(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1),
        max_seqlen_q=length, cu_seqlens_q=starts, max_seqlen_k=length, cu_seqlens_k=starts,
        causal=causal, fa_version=3,
    )  # fmt: skip
    return out.view(q.shape)


@torch.no_grad()
def attention_row(
    batch: int, length: int, flash: Callable[..., Tensor] | None, kernel: str
) -> dict:
    """One layer's attention of whole prompts, in milliseconds."""
    q = random(batch, HEADS, length, token_major=True)
    k, v = (random(batch, KV_HEADS, length, token_major=False) for _ in range(2))
    calls = {
        "tailrace": lambda: hook.tailrace_attention(LAYER, q, k, v, None, prefill_attention=kernel),
        "sdpa": lambda: hook.sdpa_attention_forward(LAYER, q, k, v, None),
    }
    if flash is not None:
        by_token = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        found = flash(*by_token, causal=True)
        found = found[0] if isinstance(found, tuple) else found
        expected = calls["sdpa"]()[0].double()
        assert error(found, expected) < 1e-2, "FlashAttention is not what SDPA computes"
        calls["flash"] = lambda: flash(*by_token, causal=True)
    return {name: time_ms(work) for name, work in calls.items()}


@torch.no_grad()
def model_row(model: torch.nn.Module, batch: int, length: int) -> dict:
    """A pass over whole prompts into an empty cache, in milliseconds."""
    ids = torch.randint(0, 1024, (batch, length), device="cuda")
    found = {}
    for name in ("tailrace", "sdpa"):
        model.set_attn_implementation(name)
        work = lambda: model(ids, logits_to_keep=1)  # noqa: E731
        found[name] = time_ms(work, repeats=7, lead_ms=PASS_LEAD_MS)
    return found


def show(title: str, rows: list[dict], names: list[str], *, with_rates: bool) -> None:
    print(f"\n{title}")
    print("  ".join(["batch  tokens", *(f"{name:>20}" for name in names)]))
    for row in rows:
        cells = []
        for name in names:
            ms = row[name]
            cell = f"{ms:.3f} ms"
            if with_rates:
                pairs = row["batch"] * row["tokens"] * (row["tokens"] + 1) / 2
                cell += f" {4 * DIM * HEADS * pairs / ms / 1e9:.0f} TFLOP/s"
            cells.append(f"{cell:>20}")
        print("  ".join([f"{row['batch']:>5}  {row['tokens']:>6}", *cells]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prefill-attention", choices=("hopper", "triton"), default="hopper")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    kernel = arguments.prefill_attention
    hook.register(prefill_attention=kernel)
    wrong = [*wrong_attention(by_hopper=kernel == "hopper"), *wrong_logits()]
    print(f"correctness: {len(wrong)} wrong", *wrong, sep="\n", flush=True)
    if wrong:
        raise SystemExit(1)
    hook.reset()
    flash = flash_attention()
    cases = [(batch, length) for length in LENGTHS for batch in BATCHES]
    sizes = [{"batch": batch, "tokens": length} for batch, length in cases]
    attention = [
        size | attention_row(*case, flash and flash[1], kernel)
        for size, case in zip(sizes, cases, strict=True)
    ]
    model = model_of(SHAPE)
    passes = [size | model_row(model, *case) for size, case in zip(sizes, cases, strict=True)]
    if hook.fallbacks() or not hook.served():
        raise SystemExit(f"not what was to be timed: {hook.served()} ours, {hook.fallbacks()}")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    flash_name = flash[0] if flash else "no FlashAttention"
    print(f"\n{torch.cuda.get_device_name()}, {versions}, ours by {kernel}, {flash_name}")
    names = ["tailrace", "sdpa", *(["flash"] if flash else [])]
    show("attention of one layer", attention, names, with_rates=True)
    show(f"a pass of {LAYERS} layers", passes, names[:2], with_rates=False)
    if arguments.out:
        found = {"attention": attention, "passes": passes, "versions": versions}
        found["prefill_attention"] = kernel
        (arguments.out / "gpu_hook.json").write_text(json.dumps(found | {"flash": flash_name}))


if __name__ == "__main__":
    main()
