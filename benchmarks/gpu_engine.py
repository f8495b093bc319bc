"""The GPU engine alone: right first, then prefill and decode rates beside their floors.

    PYTHONPATH=src:. python benchmarks/gpu_engine.py --out DIR [--skip-check | --only-check]
        [--profile] [--kv-cache-dtype fp8] [--weights awq|fp8|fp8-blocks]
        [--prefill-weights same|fp8|int8|bf16] [--prefill-attention triton|hopper]
        [--plan auto|FILE] [--phase-overlap on|off]
        [--mixed DECODESxCONTEXTxTOKENS ... [--phase-priorities DECODES,PROMPTS ...]]
    PYTHONPATH=src:. python benchmarks/gpu_engine.py --out DIR --launches [--weights ...]
        [--plan ...] [--decode-kernels triton]

Mixed: nothing but steps of so many decodes at a context and prompts that fill the tokens, by an
engine of that budget, so that the step is captured as it is in serving. With priorities, once
without overlap of phases and once by streams of each of them, in one process; tokens and their
log-probabilities by all must be equal, bit for bit.

Launches: nothing but decode steps by dependent launches (kernels/dependent_launch.py) beside steps
by plain ones, alternated over one running batch; before that, tokens and their log-probabilities
by both must be equal, bit for bit.

Check: a tiny random checkpoint of each family, several prompts batched, chunked and out of CUDA
graphs; every token chosen must be, by transformers in float32 on the same history, the best or
within the noise that bfloat16 itself makes there (four times transformers' own largest bfloat16
error). With KV in float8 both of transformers' runs keep theirs rounded to the engine's own scales
as well. Only then Qwen2.5-7B's shape with dummy weights is timed. Floors: 13.05 GFLOP a token over
630 TFLOP/s (1268 in FP8), 14.1 GB of weights and 57,344 bytes of KV a token over 4.19 TB/s
(docs/performance.md).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tailrace.config import DECODE_KERNELS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tailrace.config import EngineConfig
    from tailrace.engine.engine import Engine
    from tailrace.kernels.kv_scales import KVScales

QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
GFLOP_A_TOKEN, KV_BYTES, COPY = 13.05, 57344, 4.19e12
WEIGHTS: dict[str, tuple[float, float, dict | None]] = {
    "bf16": (14.1e9, 630.0, None),
    "awq": (
        4.5e9, 630.0,
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
         "version": "gemm"},
    ),
    "fp8": (
        7.6e9, 1268.0,
        {"quant_method": "compressed-tensors", "format": "float-quantized",
         "quantization_status": "compressed", "ignore": ["lm_head"],
         "config_groups": {"group_0": {
             "targets": ["Linear"],
             "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
         }}},
    ),
    "fp8-blocks": (
        7.6e9, 1268.0,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
}  # fmt: skip
"""Bytes that a decode step reads of them, TFLOP/s that products of prompts reach on an H200
(docs/performance.md), and what config.json says."""
DECODES = ((1, 500), (1, 4500), (8, 4500), (32, 4500), (50, 500), (64, 4500), (128, 4500))
MIXED = ((50, 500, 512), (64, 4500, 1024), (64, 4500, 2048))
"""Decodes, their context, and the tokens of a step with prompts."""
BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
LAUNCHES = (
    (1, 500), (8, 500), (16, 500), (20, 500), (32, 500), (50, 500), (128, 500), (64, 4500),
)  # fmt: skip
CHECKED = ((1, 1500), (8, 1500), (20, 700), (50, 700), (128, 100))
"""Sequences and their longest prompts, where launches or ways of overlap are compared."""
STEPS = ("weights", "fp8_activations", "kv_cache_dtype", "plan", "decode_kernels")
"""Options that decode steps go by."""
WHOLE = (*STEPS, "prefill_weights", "prefill_attention", "phase_overlap")
ROUNDS, UNTIMED_STEPS, TIMED_STEPS = 6, 3, 16
"""Of each arm."""


def parser_of_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--skip-check", action="store_true")
    parser.add_argument("--only-check", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument(
        "--mixed", nargs="+", type=mixed_sizes, metavar="DECODESxCONTEXTxTOKENS",
        help="time (and with --profile profile) nothing but steps of decodes and prompts",
    )  # fmt: skip
    parser.add_argument(
        "--launches", action="store_true", help="only compare dependent launches with plain ones"
    )
    parser.add_argument(
        "--weights", choices=tuple(WEIGHTS), default="bf16",
        help="dummy weights that are timed; tailrace check-accuracy compares such formats",
    )  # fmt: skip
    parser.add_argument(
        "--fp8-activations", choices=("many", "all"), default="many",
        help="as of tailrace serve, for what is timed",
    )  # fmt: skip
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument(
        "--prefill-weights", default="auto", help="as of tailrace serve, for what is timed"
    )
    parser.add_argument(
        "--prefill-attention", choices=("auto", "triton", "hopper"), default="auto",
        help="as of tailrace serve, for what is checked and timed",
    )  # fmt: skip
    parser.add_argument(
        "--phase-overlap", choices=("auto", "on", "off"), default="auto",
        help="as of tailrace serve, for what is timed",
    )  # fmt: skip
    parser.add_argument(
        "--phase-priorities", nargs="+", type=priorities, metavar="DECODES,PROMPTS",
        help="with --mixed: without overlap, and with streams of which the higher goes first",
    )  # fmt: skip
    parser.add_argument("--decode-kernels", choices=DECODE_KERNELS, default="auto")
    parser.add_argument("--context-length", type=int, default=8192, help="what there is room for")
    parser.add_argument("--plan", default="off", help="as of tailrace serve, for what is timed")
    return parser


def main() -> None:
    arguments = parser_of_options().parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(1) as runner:
        compared = compare_launches if arguments.launches else None
        compared = time_mixed if arguments.mixed else compared
        if not (arguments.skip_check or compared):
            for family in ("llama", "qwen2", "qwen3"):
                check_family(family, runner, arguments)
        if arguments.only_check:
            return
        with tempfile.TemporaryDirectory() as folder:
            quantization = WEIGHTS[arguments.weights][2]
            shape = QWEN_7B | ({"quantization_config": quantization} if quantization else {})
            (Path(folder) / "config.json").write_text(json.dumps(shape))
            (compared or time_qwen)(Path(folder), runner, arguments)


def make(config: EngineConfig, folder: Path, runner: ThreadPoolExecutor) -> tuple[Engine, dict]:
    from tailrace.engine import setup

    begun = time.monotonic()
    loaded = runner.submit(setup.load, config, folder).result()
    load_s = time.monotonic() - begun
    warmup_s = setup.warm_up(config, loaded, runner.submit)
    print(f"load {load_s:.1f} s, warm-up {warmup_s:.1f} s; {loaded.device}", flush=True)
    print(f"steps cost {loaded.step_time.costs}", flush=True)  # by shape: benchmarks/gpu_steps.py
    return setup.make_engine(config, loaded, runner.submit), {"loaded": loaded}


def generate(engine: Engine, prompts: list[list[int]], tokens: int) -> dict[str, list[int]]:
    from tailrace.types import EngineRequest, SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(
            EngineRequest(
                request_id=str(index), token_ids=prompt, sampling=sampling, arrival_s=float(index)
            )
        )
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason == "error":
                raise SystemExit(f"request {output.request_id}: {output.error}")
            found[output.request_id] += output.token_ids
    return found


def rounded_cache(scales: list[KVScales]) -> Any:
    """Return a transformers cache that keeps what a float8 cache of these scales would."""
    from transformers import DynamicCache

    from tailrace.kernels.kv_scales import quantised
    from tailrace.kernels.linear.float8 import FLOAT8

    class Rounded(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *rest, **named):  # noqa: ANN001, ANN002, ANN003, ANN202
            k, v = (
                (quantised(x, scale, FLOAT8).float() * scale).to(x.dtype)
                for x, scale in (
                    (key_states, scales[layer_idx].k),
                    (value_states, scales[layer_idx].v),
                )
            )
            return super().update(k, v, layer_idx, *rest, **named)

    return Rounded()


def check_family(family: str, runner: ThreadPoolExecutor, arguments: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tailrace.config import EngineConfig
    from tests.support.tiny import make_tiny_checkpoint

    folder = Path(tempfile.mkdtemp())
    # Hopper's kernel serves wide heads, and takes 128 rows at a time.
    wide = {"head_dim": 128 if family == "qwen2" else 64}
    by_hopper = arguments.prefill_attention == "hopper"
    made = make_tiny_checkpoint(folder, family, **(wide if by_hopper else {}))
    folder = made if isinstance(made, Path) else folder
    config = EngineConfig(
        model_path=str(folder), gpus=(0,), max_batch_size=8,
        max_num_batched_tokens=320 if by_hopper else 96,
        kv_cache_tokens=8192, warmup=True, kv_cache_dtype=arguments.kv_cache_dtype,
        prefill_attention=arguments.prefill_attention,
        decode_kernels=arguments.decode_kernels,
    )  # fmt: skip
    engine, kept = make(config, folder, runner)
    draw = random.Random(1)
    prompts = [
        [draw.randrange(256) for _ in range(n)] for n in (1, 5, 17, 64, 97, 130, 201, 300, 33, 80)
    ]
    found = generate(engine, prompts, 24)
    scales = kept["loaded"].runner.kv_scales
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    flips, worst, noise = 0, 0.0, 0.0
    with torch.inference_mode():
        for index, prompt in enumerate(prompts):
            output = found[str(index)]
            history = torch.tensor([prompt + output], device="cuda")
            rows = slice(len(prompt) - 1, -1)
            truth, other = (
                model(history, past_key_values=rounded_cache(scales) if scales else None)
                .logits[0, rows]
                .float()
                for model in (exact, rounded)
            )
            noise = max(noise, float((other - truth).abs().max()))
            chosen = truth.gather(1, torch.tensor(output, device="cuda")[:, None])[:, 0]
            behind = truth.amax(-1) - chosen
            flips += int((behind > 0).sum())
            worst = max(worst, float(behind.max()))
    verdict = "ok" if worst <= 4 * noise else "WRONG"
    print(
        f"{family}: {flips} of {24 * len(prompts)} tokens are not float32's first choice, the "
        f"furthest {worst:.4f} behind; transformers' bfloat16 noise {noise:.4f}: {verdict}",
        flush=True,
    )
    if verdict != "ok":
        raise SystemExit(1)


def time_qwen(folder: Path, runner: ThreadPoolExecutor, arguments: argparse.Namespace) -> None:
    import torch

    from tailrace.config import EngineConfig
    from tailrace.engine import setup

    config = EngineConfig(
        model_path=str(folder), load_format="dummy", gpus=(0,), max_batch_size=128,
        context_length=arguments.context_length, max_num_batched_tokens=8192, prefix_cache=False,
        itl_target_ms=0,
        kv_cache_dtype=arguments.kv_cache_dtype, prefill_weights=arguments.prefill_weights,
        prefill_attention=arguments.prefill_attention, plan=arguments.plan,
        decode_kernels=arguments.decode_kernels,
        phase_overlap=arguments.phase_overlap, fp8_activations=arguments.fp8_activations,
    )  # fmt: skip
    engine, kept = make(config, folder, runner)
    rows = []
    weight_bytes, tflops, _ = WEIGHTS[arguments.weights]
    copy = kept["loaded"].runner.prefill_weights
    if copy in {"fp8", "int8"}:
        tflops = WEIGHTS["fp8"][1]
    for budget in BUDGETS:
        engine = setup.make_engine(
            replace(config, max_num_batched_tokens=budget), kept["loaded"], runner.submit
        )
        rate = prefill_rate(engine, budget)
        floor = GFLOP_A_TOKEN / tflops * budget
        rows.append({"budget": budget, "tokens_s": rate})
        print(
            f"prefill, {budget:>5}-token steps: {rate:>8.0f} tokens/s, "
            f"{1e3 * budget / rate:6.1f} ms a step, "
            f"GEMM floor at {tflops:.0f} TFLOP/s {floor:6.1f} ms",
            flush=True,
        )
    for batch, context in DECODES:
        engine = setup.make_engine(config, kept["loaded"], runner.submit)
        kv_bytes = KV_BYTES // 2 if config.kv_is_float8 else KV_BYTES
        step_ms, keys = decode_step(engine, batch, context)
        floor = 1e3 * (weight_bytes + keys * kv_bytes) / COPY
        rows.append({"batch": batch, "context": context, "ms": step_ms, "floor_ms": floor})
        print(
            f"decode, {batch:>3} x {context}: {step_ms:6.2f} ms a step, floor {floor:6.2f} ms, "
            f"{step_ms / floor:.2f} x",
            flush=True,
        )
    for batch, context, budget in MIXED:
        smaller = replace(config, max_num_batched_tokens=budget)
        engine = setup.make_engine(smaller, kept["loaded"], runner.submit)
        step_ms = mixed_step(engine, batch, context)
        rows.append({"batch": batch, "context": context, "budget": budget, "ms": step_ms})
        print(
            f"mixed, {batch:>3} x {context} and prompts, {budget:>5} tokens: {step_ms:6.2f} ms a "
            "step", flush=True,
        )  # fmt: skip
    found = {"prefill_copy": copy, "device": kept["loaded"].device, "rows": rows}
    write_result("gpu_engine", arguments, WHOLE, found)
    if arguments.profile:
        for batch, context in ((50, 500), (128, 4500)):
            engine = setup.make_engine(config, kept["loaded"], runner.submit)
            begin(engine, batch, context, 64)
            profile(engine, f"decode {batch} x {context}", 5)
            drain(engine)
        engine = setup.make_engine(
            replace(config, max_num_batched_tokens=1024), kept["loaded"], runner.submit
        )
        begin(engine, 50, 500, 400)
        submit(engine, 8, 80, 1, 1000)
        profile(engine, "small mixed steps: 50 decodes x 500, prompts of 80 tokens", 4)
        drain(engine)
        begin(engine, 64, 4500, 400)
        submit(engine, 8, 4200, 1, 1000)
        profile(engine, "mixed step: 64 decodes x 4500 and 960 prompt tokens", 5)
        drain(engine)
    print(f"peak memory {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB")


def time_mixed(folder: Path, runner: ThreadPoolExecutor, arguments: argparse.Namespace) -> None:
    """Time steps of decodes and prompts: an engine of its own for each size and way of overlap."""
    from tailrace.config import EngineConfig
    from tailrace.engine import phase_overlap

    ways = [(arguments.phase_overlap, phase_overlap.PRIORITIES)]
    if arguments.phase_priorities:
        ways = [("off", (0, 0)), *(("on", given) for given in arguments.phase_priorities)]
    rows, resident, differing = [], [], 0
    for batch, context, budget in arguments.mixed:
        for overlap, priorities in ways:
            config = EngineConfig(
                model_path=str(folder), load_format="dummy", gpus=(0,), max_batch_size=128,
                context_length=arguments.context_length, max_num_batched_tokens=budget,
                prefix_cache=False, itl_target_ms=0, kv_cache_dtype=arguments.kv_cache_dtype,
                plan=arguments.plan, prefill_weights=arguments.prefill_weights,
                phase_overlap=overlap,
                prefill_attention=arguments.prefill_attention,
        decode_kernels=arguments.decode_kernels,
                fp8_activations=arguments.fp8_activations,
                kv_cache_tokens=batch * (context + 600) + 70_000,
            )  # fmt: skip
            with patch.object(phase_overlap, "PRIORITIES", priorities):
                engine, kept = make(config, folder, runner)
            resident.append((batch, context, budget, overlap, priorities, engine, kept))
        differing += tell_apart([engine for *_, engine, _ in resident[-len(ways) :]])
    for batch, context, budget, overlap, priorities, engine, _ in resident:
        step_ms = mixed_step(engine, batch, context)
        rows.append(
            {"batch": batch, "context": context, "budget": budget, "ms": step_ms,
             "overlap": overlap, "priorities": priorities}
        )  # fmt: skip
        print(
            f"mixed, {batch} x {context}, {budget} tokens, overlap {overlap} {priorities}: "
            f"{step_ms:.2f} ms a step", flush=True,
        )  # fmt: skip
        if arguments.profile:
            begin(engine, batch, context, 400)
            submit(engine, 16, 4096, 1, 1000)
            profile(engine, f"{batch} decodes x {context}, {budget} tokens", 5)
            drain(engine)
    write_result("gpu_mixed", arguments, WHOLE, {"rows": rows, "differing": differing})
    if differing:
        raise SystemExit(f"{differing} answers depend on the way of overlap")


def tell_apart(engines: list[Engine]) -> int:
    """Return how many answers differ from the first engine's, in any bit of tokens and scores."""
    differing = 0
    for batch, longest in CHECKED if len(engines) > 1 else ():
        first, *others = (scored(engine, batch, longest, logprobs=0) for engine in engines)
        here = sum(first[name] != found[name] for found in others for name in first)
        print(
            f"overlap, {batch:>3} sequences: {here} of {len(others) * batch} answers differ from "
            "those without", flush=True,
        )  # fmt: skip
        differing += here
    return differing


def priorities(words: str) -> tuple[int, int]:
    """Return those of decodes and prompts in CUDA's numbers, of which lower ones go first.

    Raises:
        ValueError: It is not two numbers.
    """
    decodes, prompts = map(int, words.split(","))
    return -decodes, -prompts


def mixed_sizes(words: str) -> tuple[int, int, int]:
    """Return decodes, context and tokens.

    Raises:
        ValueError: It is not three numbers.
    """
    batch, context, tokens = map(int, words.split("x"))
    return batch, context, tokens


def result_name(kind: str, arguments: argparse.Namespace, options: tuple[str, ...]) -> str:
    """Return a file's name that is another one for every setting: no run overwrites another's."""
    given = {option: getattr(arguments, option) for option in options}
    if given["plan"] not in {"off", "auto"}:  # a file, known by what it holds
        file = Path(given["plan"])
        given["plan"] = f"{file.stem[:40]}-{hashlib.sha256(file.read_bytes()).hexdigest()[:8]}"
    parts = [f"{option.replace('_', '-')}-{value}" for option, value in given.items()]
    return "_".join([kind, *parts]) + ".json"


def write_result(
    kind: str, arguments: argparse.Namespace, options: tuple[str, ...], found: dict[str, Any]
) -> None:
    settings = {option: getattr(arguments, option) for option in options}
    file = arguments.out / result_name(kind, arguments, options)
    file.write_text(json.dumps({**settings, **found}))
    print(f"written: {file}", flush=True)


def config_of(folder: Path, arguments: argparse.Namespace) -> EngineConfig:
    """Return the settings where ways to launch are compared."""
    from tailrace.config import EngineConfig

    return EngineConfig(
        model_path=str(folder), load_format="dummy", gpus=(0,), max_batch_size=128,
        context_length=arguments.context_length, max_num_batched_tokens=8192, prefix_cache=False,
        itl_target_ms=0,
        kv_cache_dtype=arguments.kv_cache_dtype, prefill_weights="same", plan=arguments.plan,
        fp8_activations=arguments.fp8_activations, gpu_memory_utilization=0.8,
    )  # fmt: skip


def compare_launches(
    folder: Path, runner: ThreadPoolExecutor, arguments: argparse.Namespace
) -> None:
    config = config_of(folder, arguments)
    engine, kept = make(config, folder, runner)
    graphs = kept["loaded"].runner.step_graphs
    begun = time.monotonic()
    # Both anew: what serves is one or the other, by the size of the step.
    arms = {
        name: runner.submit(
            partial(graphs.captured_decodes, dependent=name == "dependent")
        ).result()
        for name in ("plain", "dependent")
    }
    print(f"captured by both in {time.monotonic() - begun:.1f} s", flush=True)

    def serve(arm: str) -> None:
        # On the runner's thread, so between the steps that it queues.
        runner.submit(graphs.serve_by, arms[arm]).result()

    for batch, longest in CHECKED:
        check_launches(engine, serve, batch, longest)
    weight_bytes = WEIGHTS[arguments.weights][0]
    rows = []
    for batch, context in LAUNCHES:
        times, keys = decode_steps(engine, serve, batch, context)
        kv_bytes = KV_BYTES // 2 if config.kv_is_float8 else KV_BYTES
        floor = 1e3 * (weight_bytes + keys * kv_bytes) / COPY
        plain, ours = (statistics.median(times[arm]) for arm in arms)
        rows.append({"batch": batch, "context": context, "floor_ms": floor, "ms": times})
        print(
            f"decode, {batch:>3} x {context}: plain {plain:6.3f} ms ({plain / floor:.2f} x), "
            f"dependent {ours:6.3f} ms ({ours / floor:.2f} x), saved {1e3 * (plain - ours):5.0f} "
            f"us; floor {floor:.2f} ms; quartiles of a step's difference by rounds "
            f"{quartiles(times)} us",
            flush=True,
        )
    write_result("gpu_launches", arguments, STEPS, {"rows": rows})


def quartiles(times: dict[str, list[float]]) -> str:
    """Return the quartiles, over rounds, of what a median step saves, in microseconds."""
    medians = [
        [
            statistics.median(times[arm][first : first + TIMED_STEPS])
            for first in range(0, len(times[arm]), TIMED_STEPS)
        ]
        for arm in ("plain", "dependent")
    ]
    saved = [1e3 * (plain - ours) for plain, ours in zip(*medians, strict=True)]
    return " / ".join(f"{value:.0f}" for value in statistics.quantiles(saved))


def check_launches(engine: Engine, serve: Callable[[str], None], batch: int, longest: int) -> None:
    """Exit unless both arms give the same bits, twice."""
    found = []
    for arm in ("plain", "dependent", "plain", "dependent"):
        serve(arm)
        found.append((scored(engine, batch, longest, logprobs=0), scored(engine, batch, longest)))
    plain, dependent, plain_again, dependent_again = found
    if plain != plain_again:
        raise SystemExit(f"{batch} sequences: plain launches differ from themselves")
    if not plain == dependent == dependent_again:
        raise SystemExit(f"{batch} sequences: dependent launches do not give what plain ones do")
    tokens = sum(map(len, plain[0].values()))
    print(f"launches, {batch:>3} sequences: {tokens} tokens and scores are the same", flush=True)


def scored(
    engine: Engine, batch: int, longest: int, logprobs: int | None = None
) -> dict[str, list[tuple[int, float]]]:
    """Return the tokens of some prompts, each with its log-probability, if that is asked for."""
    from tailrace.types import EngineRequest, SamplingParams

    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=logprobs)
    draw = random.Random(batch)
    for index in range(batch):
        ids = [draw.randrange(1000, 150000) for _ in range(draw.randrange(1, longest))]
        engine.add(
            EngineRequest(
                request_id=str(index), token_ids=ids, sampling=sampling, arrival_s=float(index)
            )
        )
    found: dict[str, list[tuple[int, float]]] = {}
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason == "error":
                raise SystemExit(f"request {output.request_id}: {output.error}")
            scores = [entry.logprob for entry in output.logprobs or ()] or [0.0] * len(
                output.token_ids
            )
            pairs = zip(output.token_ids, scores, strict=True)
            found.setdefault(output.request_id, []).extend(pairs)
    return found


def decode_steps(
    engine: Engine, serve: Callable[[str], None], batch: int, context: int
) -> tuple[dict[str, list[float]], int]:
    """Return the milliseconds of each arm's steps, and the keys halfway through them."""
    begin(engine, batch, context, 400)
    times: dict[str, list[float]] = {"plain": [], "dependent": []}
    keys = []
    for index in range(ROUNDS):
        keys.append(sum(s.num_computed for s in engine.scheduler.running))
        # Sequences grow: each arm goes first as often as the other.
        for arm in list(times)[:: 1 - 2 * (index % 2)]:
            serve(arm)
            for _ in range(UNTIMED_STEPS):
                engine.step()
            for _ in range(TIMED_STEPS):
                begun = time.perf_counter()
                engine.step()
                times[arm].append(1e3 * (time.perf_counter() - begun))
    engine.abort([s.request_id for s in list(engine.scheduler.running)])
    drain(engine)
    return times, keys[ROUNDS // 2]


def submit(engine: Engine, count: int, length: int, tokens: int, first: int = 0) -> None:
    from tailrace.types import EngineRequest, SamplingParams

    draw = random.Random(count)
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for index in range(first, first + count):
        ids = [draw.randrange(1000, 150000) for _ in range(length)]
        engine.add(
            EngineRequest(
                request_id=str(index), token_ids=ids, sampling=sampling, arrival_s=float(index)
            )
        )


def drain(engine: Engine) -> int:
    tokens = 0
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason == "error":
                raise SystemExit(f"request {output.request_id}: {output.error}")
            tokens += len(output.token_ids)
    return tokens


def prefill_rate(engine: Engine, budget: int) -> float:
    """Prompts of 4096 tokens, one token each, as many as make twenty steps or more."""
    count = max(4, 16 * budget // 4096)
    submit(engine, 2, 4096, 1)
    drain(engine)
    begun = time.perf_counter()
    submit(engine, count, 4096, 1)
    drain(engine)
    return count * 4096 / (time.perf_counter() - begun)


def begin(engine: Engine, batch: int, context: int, tokens: int) -> None:
    """Prefill `batch` prompts and go on until all of them decode."""
    submit(engine, batch, context, tokens)
    seen: set[str] = set()
    while len(seen) < batch:
        seen |= {output.request_id for output in engine.step()}


def decode_step(engine: Engine, batch: int, context: int) -> tuple[float, int]:
    """Return the median milliseconds of a step, and the keys that its sequences have by then."""
    # With 8192-token steps the first sequences are far ahead when the last has its first token.
    begin(engine, batch, context, 400)
    times = []
    for _ in range(40):
        begun = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begun)
    keys = sum(s.num_computed for s in engine.scheduler.running)
    engine.abort([s.request_id for s in list(engine.scheduler.running)])
    drain(engine)
    return 1e3 * statistics.median(times), keys


def mixed_step(engine: Engine, batch: int, context: int) -> float:
    """Return the median milliseconds of a step in which prompts fill what decodes leave."""
    begin(engine, batch, context, 400)
    submit(engine, 32, 4096, 1, 1000)
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begun)
    engine.abort([s.request_id for s in list(engine.scheduler.running)])
    drain(engine)
    return 1e3 * statistics.median(times)


def profile(engine: Engine, title: str, steps: int) -> None:
    """Print a table of device time by kernel."""
    import torch

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    ) as taken:
        begun = time.perf_counter()
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
        wall_s = time.perf_counter() - begun
    sums: dict[str, list[float]] = {}
    for event in taken.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = sums.setdefault(event.name[:90], [0, 0.0])
            entry[0] += 1
            entry[1] += event.device_time_total / 1e3
    total = sum(ms for _, ms in sums.values())
    print(f"\n{title}: {1e3 * wall_s / steps:.2f} ms a step, kernels {total / steps:.2f} ms")
    for name, (count, ms) in sorted(sums.items(), key=lambda item: -item[1][1])[:14]:
        print(f"  {ms / steps:8.3f} ms {count / steps:6.0f} x  {name}")


if __name__ == "__main__":
    main()
