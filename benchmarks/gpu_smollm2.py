"""SmolLM2's real weights on a GPU: perplexity beside transformers', and greedy agreement.

    python benchmarks/gpu_smollm2.py --model FILE.gguf --text TEXT [--text TEXT]

The engine and transformers load the same converted checkpoint on the same device. Perplexity is of
100,000 characters of real text in windows of 1024 tokens, by the engine's own prompt scores
(`prompt_logprobs`), and must lie within 0.5 % of transformers' in the same dtype. Greedy: the
engine continues 32 pieces of the text by 64 tokens, batched and out of graphs; every token is
compared with float32's choice on the same history. One that is not its first must lie within the
noise that transformers' own half precision makes there.
"""

from __future__ import annotations

import argparse
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_engine import generate, make
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tailrace.config import EngineConfig
from tailrace.models import gguf
from tailrace.types import EngineRequest, SamplingParams

WINDOW, CHARACTERS = 1024, 100_000
PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 200, 64
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="The GGUF file, or `smollm2`.")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--kv-cache-dtype", default="auto")
    arguments = parser.parse_args()
    folder = gguf.resolve(arguments.model)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    share = CHARACTERS // len(arguments.text)
    text = "\n".join(file.read_text("utf-8")[:share] for file in arguments.text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    print(f"{len(text)} characters, {len(ids)} tokens", flush=True)
    windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - 1, WINDOW)]
    exact = load(folder, torch.float32)
    reference = perplexity(exact, windows)
    print(f"transformers float32: perplexity {reference:.4f}", flush=True)
    is_right = True
    with ThreadPoolExecutor(1) as runner:
        for name, dtype in DTYPES.items():
            config = EngineConfig(
                model_path=str(folder), gpus=(0,), dtype=name, max_batch_size=PROMPTS,
                context_length=2048, kv_cache_tokens=65536, max_num_batched_tokens=1024,
                kv_cache_dtype=arguments.kv_cache_dtype,
            )  # fmt: skip
            engine, _ = make(config, folder, runner)
            is_right &= compare(
                name, engine, windows, load(folder, dtype), exact,
                is_bound=arguments.kv_cache_dtype == "auto",
            )  # fmt: skip
    raise SystemExit(0 if is_right else 1)


def compare(
    name: str,
    engine: Any,
    windows: list[list[int]],
    rounded: Any,
    exact: Any,
    *,
    is_bound: bool,
) -> bool:
    """Print one dtype's figures; return whether they are within bounds.

    Transformers' noise bounds the greedy choices only where both keep KV alike (`is_bound`).
    """
    theirs = perplexity(rounded, windows)
    ours = engine_perplexity(engine, windows)
    apart = ours / theirs - 1
    print(
        f"{name}: perplexity {ours:.4f}, transformers {theirs:.4f}, {apart:+.3%} apart "
        f"(bound 0.5 %): {'ok' if abs(apart) <= 0.005 else 'WRONG'}",
        flush=True,
    )
    prompts = [window[:PROMPT_TOKENS] for window in windows if len(window) >= PROMPT_TOKENS]
    prompts = prompts[:PROMPTS]
    found = generate(engine, prompts, OUTPUT_TOKENS)
    flips, worst, noise = regret(rounded, exact, prompts, found)
    bound = 4 * noise if is_bound else math.inf
    total = len(prompts) * OUTPUT_TOKENS
    print(
        f"{name}: {total - flips} of {total} greedy tokens are float32's first choice on the same "
        f"history, the furthest {worst:.4f} behind (transformers' own noise there {noise:.4f}): "
        f"{'ok' if worst <= bound else 'WRONG'}",
        flush=True,
    )
    return abs(apart) <= 0.005 and worst <= bound


def load(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()


@torch.inference_mode()
def perplexity(model: Any, windows: list[list[int]]) -> float:
    total, count = 0.0, 0
    for window in windows:
        row = torch.tensor([window], device="cuda")
        scores = model(row).logits[0, :-1].float().log_softmax(-1)
        total -= float(scores.gather(1, row[0, 1:, None]).double().sum())
        count += len(window) - 1
    return math.exp(total / count)


def engine_perplexity(engine: Any, windows: list[list[int]]) -> float:
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=0)
    for index, window in enumerate(windows):
        engine.add(
            EngineRequest(
                request_id=f"w{index}", token_ids=window, sampling=sampling, arrival_s=float(index)
            )
        )
    total, count = 0.0, 0
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason == "error":
                raise SystemExit(f"{output.request_id}: {output.error}")
            known = [entry for entry in output.prompt_logprobs or [] if entry is not None]
            total -= sum(entry.logprob for entry in known)
            count += len(known)
    if count != sum(len(window) - 1 for window in windows):
        raise SystemExit(f"{count} tokens were scored: some are missing")
    return math.exp(total / count)


@torch.inference_mode()
def regret(
    rounded: Any, exact: Any, prompts: list[list[int]], found: dict[str, list[int]]
) -> tuple[int, float, float]:
    """Return tokens that are not float32's first, the furthest behind, and the dtype's noise."""
    flips, worst, noise = 0, 0.0, 0.0
    for index, prompt in enumerate(prompts):
        output = found[str(index)]
        history = torch.tensor([prompt + output], device="cuda")
        rows = slice(len(prompt) - 1, -1)
        truth = exact(history).logits[0, rows].float()
        noise = max(noise, float((rounded(history).logits[0, rows].float() - truth).abs().max()))
        chosen = truth.gather(1, torch.tensor(output, device="cuda")[:, None])[:, 0]
        behind = truth.amax(-1) - chosen
        flips += int((behind > 0).sum())
        worst = max(worst, float(behind.max()))
    return flips, worst, noise


if __name__ == "__main__":
    main()
