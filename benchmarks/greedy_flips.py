"""How often greedy output of SmolLM2 changes with the company it is computed in.

    python benchmarks/greedy_flips.py --prompts 32 --tokens 64

Each prompt (60 to 400 tokens of Python's own documentation) is generated alone, whole in one
chunk, then together with fifteen others in chunks of a 96-token step budget, then again out of the
prefix cache. Counted: sequences that differ, and the top-2 margin (difference of log-probabilities)
where they first do. Also: how often float16 weights (and bfloat16 products, where the processor has
them) choose another token than float32 when both are fed the same history, the margin at which they
do, and the mean Kullback-Leibler divergence from float32's distribution.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import random
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from tailrace.engine.engine import Engine
    from tailrace.models.causal_lm import CausalLM
    from tailrace.types import TokenLogprobs

SLOTS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()

    from tailrace.engine import setup

    setup.pin_threads(0)
    from tailrace.kernels.select import select
    from tailrace.models.gguf import resolve
    from tailrace.models.loader import load_model

    folder = resolve("smollm2")
    kernels = select("auto", setup.thread_count(0))
    dtypes = ("float32", "float16", *(("bfloat16",) if has_bfloat16() else ()))
    models = {name: load_model(folder, dtype=name, kernels=kernels) for name in dtypes}
    prompts = make_prompts(folder, arguments.prompts)
    for name, model in models.items():
        compare_company(name, model, prompts, arguments.tokens)
    full = models.pop("float32")
    for name, model in models.items():
        compare_weights(name, model, full, prompts, arguments.tokens)


def has_bfloat16() -> bool:
    from tailrace.errors import ConfigError
    from tailrace.kernels.linear.bfloat16 import require_hardware

    try:
        require_hardware()
    except ConfigError as error:
        print(f"bfloat16 left out: {error}")
        return False
    return True


def make_prompts(folder: Path, count: int) -> list[list[int]]:
    from tailrace.text.tokenizer import Tokenizer

    text = "\n".join(pydoc_data.topics.topics.values())
    ids = Tokenizer.load(folder).encode(text[:400_000], add_special_tokens=False)
    draw = random.Random(0)
    starts = [draw.randrange(len(ids) - 400) for _ in range(count)]
    return [ids[start : start + draw.randrange(60, 400)] for start in starts]


def compare_company(name: str, model: CausalLM, prompts: list[list[int]], tokens: int) -> None:
    alone = [generate(engine_of(model, 4096), [prompt], tokens)[0] for prompt in prompts]
    engine = engine_of(model, 96)
    for label in ("batched and chunked", "again, out of the prefix cache"):
        together: list[list[TokenLogprobs]] = []
        for start in range(0, len(prompts), SLOTS):
            together += generate(engine, prompts[start : start + SLOTS], tokens)
        margins = [m for a, b in zip(alone, together, strict=True) if (m := first_flip(a, b))]
        print(
            f"{name}, {label}: {len(margins)} of {len(prompts)} sequences of {tokens} tokens differ"
            + (f"; margins at the first difference up to {max(margins):.2e}" if margins else "")
        )


def first_flip(a: list[TokenLogprobs], b: list[TokenLogprobs]) -> float | None:
    """The top-2 margin where two generations first differ; None where they do not."""
    for left, right in zip(a, b, strict=True):
        if left.token_id != right.token_id:
            return max(left.top_logprobs[0] - left.top_logprobs[1], 1e-12)
    return None


def compare_weights(
    name: str, other: CausalLM, full: CausalLM, prompts: list[list[int]], tokens: int
) -> None:
    flips, positions, worst, divergence = 0, 0, 0.0, 0.0
    for prompt in prompts:
        output = generate(engine_of(full, 4096), [prompt], tokens)[0]
        history = prompt + [entry.token_id for entry in output]
        exact, rounded = (logits_of(model, history) for model in (full, other))
        differs = exact.argmax(-1) != rounded.argmax(-1)
        top = exact.log_softmax(-1).topk(2, -1).values
        margins = (top[:, 0] - top[:, 1])[differs]
        flips += int(differs.sum())
        positions += len(history)
        worst = max(worst, float(margins.max()) if len(margins) else 0.0)
        p, q = exact.double().log_softmax(-1), rounded.double().log_softmax(-1)
        divergence += float((p.exp() * (p - q)).sum())
    print(
        f"{name} against float32, same history: {flips} of {positions} positions choose "
        f"another token ({flips / positions:.3%}); largest margin among them {worst:.3f}; "
        f"mean KL {divergence / positions:.2e}"
    )


def logits_of(model: CausalLM, ids: list[int]) -> torch.Tensor:
    from tailrace.engine.runner import allocate_kv
    from tailrace.kernels.attention_batch import AttentionBatch

    length = len(ids)
    blocks = -(-length // 16)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, length], dtype=torch.int32),
        kv_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        positions=torch.arange(length),
        slots=torch.arange(length),
        max_query_len=length,
        max_kv_len=length,
    )
    with torch.inference_mode():
        return model.logits(model.forward(torch.tensor(ids), batch, allocate_kv(model, blocks, 16)))


def engine_of(model: CausalLM, budget: int) -> Engine:
    from concurrent.futures import Future

    from tailrace.clock import monotonic
    from tailrace.engine.block_manager import BlockManager
    from tailrace.engine.engine import Engine
    from tailrace.engine.runner import Runner
    from tailrace.engine.sampler import Sampler
    from tailrace.engine.scheduler import Scheduler

    def run_now(function, *args) -> Future:  # noqa: ANN001, ANN002 -- the executor's own shape
        done: Future = Future()
        done.set_result(function(*args))
        return done

    config = model.config
    blocks = 2048
    sampler = Sampler(SLOTS, config.vocab_size, config.eos_token_ids, 0)
    return Engine(
        Scheduler(BlockManager(blocks, 8), max_batch_size=SLOTS, token_budget=budget),
        Runner(model, sampler, num_blocks=blocks, block_size=8, num_slots=SLOTS),
        submit=run_now,
        clock=monotonic,
        context_length=config.max_position,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
    )


def generate(engine: Engine, prompts: list[list[int]], tokens: int) -> list[list[TokenLogprobs]]:
    from tailrace.types import EngineRequest, SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=2)
    for i, prompt in enumerate(prompts):
        engine.add(
            EngineRequest(
                request_id=str(i), token_ids=prompt, sampling=sampling, arrival_s=float(i)
            )
        )
    chosen: dict[str, list[TokenLogprobs]] = {str(i): [] for i in range(len(prompts))}
    while engine.has_work:
        for output in engine.step():
            chosen[output.request_id] += output.logprobs or []
    return list(chosen.values())


if __name__ == "__main__":
    main()
