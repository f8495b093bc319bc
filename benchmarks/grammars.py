"""What a grammar costs: compiling, and one mask, for plain and for hostile ones.

    python benchmarks/grammars.py [FOLDER]     a folder with tokenizer.json; SmolLM2's by default

Times are CPU seconds of the one thread that works, so that a busy machine changes them little.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import numpy as np
from llguidance import LLMatcher

from tailrace.server.structured import Constraint, grammar_of
from tailrace.text.grammar import GrammarCompiler, GrammarError, allowed
from tailrace.text.tokenizer import Tokenizer

STEPS = 200
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WIDE = {
    "type": "object",
    "properties": {f"field_{i}": PERSON for i in range(150)},
    "required": [f"field_{i}" for i in range(0, 150, 2)],
    "additionalProperties": False,
}
OPTIONS = {
    "anyOf": [
        {"type": "object", "properties": {f"p{i}": {"type": "string"}}, "required": [f"p{i}"]}
        for i in range(300)
    ]
}


def cases() -> dict[str, str]:
    def of(kind: str, value: object) -> str:
        return grammar_of(Constraint(kind, value, kind))

    return {
        "any JSON object": of("json_object", None),
        "a person": of("json", PERSON),
        "150 persons": of("json", WIDE),
        "one of 300 objects": of("json", OPTIONS),
        "one of 1000 texts": of("choice", [f"choice number {i}" for i in range(1000)]),
        "a regular expression": of("regex", r"[A-Z][a-z]+ \d{4}-\d{2}-\d{2}"),
        "(.{0,500}x){50}": of("regex", "(.{0,500}x){50}"),
        "(.*a.{20}){3}": of("regex", "(.*a.{20}){3}"),
        "(a{1000}){1000}": of("regex", "(a{1000}){1000}"),
        "2000 optional members": LLMatcher.grammar_from_json_schema(
            {"properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
        ),
    }


def measure(compiler: GrammarCompiler, text: str, vocab_size: int) -> str:
    began_s = time.thread_time()
    try:
        state = compiler.compile(text).start()
    except GrammarError as error:
        return f"refused in {1e3 * (time.thread_time() - began_s):.1f} ms: {str(error)[:60]}"
    compile_s = time.thread_time() - began_s
    chance, times_s, end = random.Random(0), [], ""
    for _ in range(STEPS):
        began_s = time.thread_time()
        mask = state.mask()
        times_s.append(time.thread_time() - began_s)
        options = np.flatnonzero(allowed(mask, vocab_size))
        if state.error or not len(options):
            end = f", then: {state.error[:50]}"
            break
        state.take(int(chance.choice(options)))
        if state.is_complete:
            break
    worst, mean = 1e3 * max(times_s), 1e3 * sum(times_s) / len(times_s)
    return f"{1e3 * compile_s:8.1f} {mean:9.3f} {worst:9.3f}{end}"


def main() -> None:
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
    else:
        from tailrace.config import DEFAULT_MODEL
        from tailrace.models.gguf import resolve

        folder = resolve(DEFAULT_MODEL)
    tokenizer = Tokenizer.load(folder)
    compiler = GrammarCompiler(folder, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])
    began_s = time.thread_time()
    compiler.compile("start: /a/")
    print(f"{tokenizer.vocab_size} tokens, loaded in {time.thread_time() - began_s:.2f} s")
    print(f"{'':24} compile ms   mask mean     worst")
    for name, text in cases().items():
        print(f"{name:24} {measure(compiler, text, tokenizer.vocab_size)}")


if __name__ == "__main__":
    main()
