from __future__ import annotations

import json
import random
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from tailrace.text.grammar import (
    MAX_GRAMMAR_BYTES,
    GrammarCompiler,
    GrammarError,
    allowed,
)
from tests.support.schemas import SCHEMAS, fits
from tests.support.tiny import EOS_ID, VOCAB_SIZE, write_tiny_tokenizer

SPACE = set(b" \n\r\t")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder)
    return GrammarCompiler(folder, VOCAB_SIZE, [EOS_ID])


def of_schema(schema) -> str:
    return LLMatcher.grammar_from_json_schema(schema)


def ids_of(mask) -> set[int]:
    return set(np.flatnonzero(allowed(mask, VOCAB_SIZE)).tolist())


def draw_at_random(state, seed: int, limit: int = 400) -> tuple[list[int], bool]:
    """Draw what the masks allow, rarely a space; return the ids and whether it came to an end."""
    chance = random.Random(seed)
    ids: list[int] = []
    for _ in range(limit):
        options = sorted(ids_of(state.mask()))
        assert options, "a dead end"
        if EOS_ID in options and chance.random() < 0.5:
            return ids, True
        dense = [i for i in options if i not in SPACE and i != EOS_ID]
        if not dense and EOS_ID in options:
            return ids, True
        pool = options if not dense or chance.random() < 0.05 else dense
        ids.append(chance.choice([i for i in pool if i != EOS_ID]))
        state.take(ids[-1])
        assert not state.error
        if state.is_complete:
            return ids, True
    return ids, False


@settings(max_examples=60, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 10**6))
def test_whatever_the_logits_say_the_output_fits_the_schema(compiler, schema, seed):
    ids, ended = draw_at_random(compiler.compile(of_schema(schema)).start(), seed)
    if ended:
        assert fits(json.loads(bytes(ids).decode()), schema)


def test_the_end_is_allowed_where_what_is_there_is_complete_and_only_there(compiler):
    state = compiler.compile(of_schema({"type": "integer"})).start()
    assert EOS_ID not in ids_of(state.mask())
    state.take(ord("4"))
    assert EOS_ID in ids_of(state.mask())
    assert ord("2") in ids_of(state.mask())
    assert not state.is_complete  # another digit may follow
    state.take(EOS_ID)
    assert state.is_complete


def test_an_object_is_complete_with_its_last_brace(compiler):
    state = compiler.compile(of_schema({"type": "object"})).start()
    for byte in b'{"a": [1, {}]':
        state.take(byte)
        assert not state.is_complete
    state.take(ord("}"))
    assert state.is_complete
    assert ids_of(state.mask()) == {EOS_ID}


def test_a_state_is_started_where_a_preempted_sequence_was(compiler):
    grammar = compiler.compile(LLMatcher.grammar_from_regex("ab|ac"))
    state = grammar.start([ord("a")])
    assert ids_of(state.mask()) == {ord("b"), ord("c")}
    assert ids_of(grammar.start().mask()) == {ord("a")}  # the others are not moved


def test_a_token_that_is_not_allowed_is_an_error_from_then_on(compiler):
    state = compiler.compile(LLMatcher.grammar_from_regex("ab")).start()
    state.take(ord("z"))
    assert "grammar" in state.error
    assert not state.is_complete


def test_masks_are_looked_ahead_for_on_threads(tmp_path):
    write_tiny_tokenizer(tmp_path)
    compiler = GrammarCompiler(tmp_path, VOCAB_SIZE, [EOS_ID])
    try:
        grammar = compiler.compile_soon(LLMatcher.grammar_from_regex("[ab]{3}c")).result()
        states = [grammar.start() for _ in range(9)]
        for letter in "abac":
            for state in states:
                assert ord(letter) in ids_of(state.mask())
                state.take(ord(letter))
                state.look_ahead()
        assert all(state.is_complete for state in states)
    finally:
        compiler.close()


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        pytest.param(of_schema({"type": "objct"}), "objct", id="unknown type"),
        pytest.param(of_schema({"enum": []}), "Unsatisfiable", id="unsatisfiable"),
        pytest.param(of_schema({"not": {"type": "string"}}), "not", id="unimplemented"),
        pytest.param(of_schema({"$ref": "http://x/y"}), "does not fetch", id="remote"),
        pytest.param(of_schema({"$ref": "#/$defs/none"}), "none", id="dangling"),
        pytest.param(LLMatcher.grammar_from_regex("(?=a)b"), "look-ahead", id="look-ahead"),
        pytest.param(LLMatcher.grammar_from_regex("(a"), "regex", id="open bracket"),
        pytest.param(
            LLMatcher.grammar_from_regex("((a{9000}){9000}){90}"), "too many", id="repetition"
        ),
        pytest.param(
            of_schema('{"type":"array","items":' * 2000 + "{}" + "}" * 2000), "recursion", id="deep"
        ),
        pytest.param(
            of_schema(
                {
                    "allOf": [
                        {"anyOf": [{"properties": {f"{i}{j}": {"const": j}}} for j in range(8)]}
                        for i in range(6)
                    ]
                }
            ),
            "too large",
            id="product",
        ),
        pytest.param("x" * (MAX_GRAMMAR_BYTES + 1), "the limit is 65536", id="size"),
        pytest.param("start: " + "(" * 3000 + '"a"' + ")" * 3000, "nested", id="nested"),
        pytest.param("start: other", "other", id="unknown rule"),
    ],
)
def test_a_grammar_that_cannot_be_served_is_refused_with_the_reason(compiler, grammar, reason):
    with pytest.raises(GrammarError, match=reason):
        compiler.compile(grammar)


def test_a_grammar_that_becomes_too_complex_ends_its_own_sequence(compiler):
    """Its states are 2^20 and more: bounded when it is followed, if not before."""
    pattern = "(.*a.{40}|.*b.{41}){3}c"
    try:
        state = compiler.compile(LLMatcher.grammar_from_regex(pattern)).start()
    except GrammarError:
        return
    chance = random.Random(0)
    for _ in range(3000):
        options = ids_of(state.mask())
        if state.error:
            break
        state.take(chance.choice([i for i in b"abxy" if i in options]))
    assert "too" in state.error


def test_what_one_sequence_uses_up_is_not_anothers_error(compiler):
    """Copies share a lexer with a bounded number of states."""
    text = LLMatcher.grammar_from_regex("(.{0,500}x){50}")
    grammar = compiler.compile(text)

    def follow(state, seed):
        chance = random.Random(seed)
        for step in range(5000):
            options = sorted(ids_of(state.mask()) - {EOS_ID})
            if state.error or not options:
                return step
            state.take(chance.choice(options))
        return 5000

    bystander = grammar.start()
    for letter in b"before":
        bystander.take(letter)
    lengths = [follow(grammar.start(), seed) for seed in (1, 2, 1)]
    assert min(lengths) > 100
    assert ord("x") in ids_of(bystander.mask())
    assert not bystander.error
    assert grammar.is_worn == (min(lengths) < 5000)
    assert (compiler.compile(text) is grammar) != grammar.is_worn


def test_many_grammars_are_not_all_kept(compiler):
    for number in range(300):
        compiler.compile(LLMatcher.grammar_from_regex(f"x{number}"))
    assert len(compiler._kept) <= 32


@pytest.mark.slow
def test_thousands_of_schemas_leave_memory_where_it_was(compiler):
    def resident_bytes() -> int:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * resource.getpagesize()

    def compile_some(first: int, count: int) -> None:
        for number in range(first, first + count):
            properties = {f"p{number}_{i}": {"type": "string"} for i in range(8)}
            compiler.compile(of_schema({"type": "object", "properties": properties}))

    compile_some(0, 500)
    before = resident_bytes()
    compile_some(500, 2500)
    # Of a schema 6 KiB at most, less than its text takes.
    assert resident_bytes() - before < 16 * 2**20


def test_a_tokenizer_that_cannot_be_read_is_every_grammars_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    broken = GrammarCompiler(tmp_path, VOCAB_SIZE, [EOS_ID])
    broken.load()  # a server starts without grammars all the same
    for _ in range(2):
        with pytest.raises(GrammarError, match="does not go with grammars"):
            broken.compile(LLMatcher.grammar_from_regex("a"))


def test_the_same_text_is_compiled_once(compiler):
    text = LLMatcher.grammar_from_regex("once")
    assert compiler.compile(text) is compiler.compile(text)


def test_a_model_without_an_end_is_refused(tmp_path):
    write_tiny_tokenizer(tmp_path)
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        GrammarCompiler(tmp_path, VOCAB_SIZE, []).compile(LLMatcher.grammar_from_regex("a"))
