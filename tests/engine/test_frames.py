"""The sizes of steps that are captured."""

from __future__ import annotations

import pytest

from tailrace.engine.frames import (
    Frame,
    FrameSizes,
    fitting_frame,
    graph_buckets,
    kept_frames,
    mixed_frames,
)


def test_buckets_cover_every_batch_size():
    for most in (1, 3, 32, 33, 128, 256):
        sizes = graph_buckets(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most


def test_mixed_frames_stay_within_the_budget_and_start_with_the_smallest():
    frames = mixed_frames(128, 1024, 64)
    assert all(frame.rows <= 1024 for frame in frames)
    assert frames[0] == Frame(0, 64, 16, 17)
    assert {frame.decodes for frame in frames} == {0, 16, 32, 64, 96, 128}
    full = {frame.decodes: frame.tokens for frame in frames if frame.rows == 1024}
    assert full == {0: 1024, 16: 1008, 32: 992, 64: 960, 96: 928, 128: 896}


def test_a_step_takes_a_frame_that_it_fits_without_much_padding():
    frames = mixed_frames(128, 8192, 64)

    def rows(decodes, tokens):
        frame = fitting_frame(frames, decodes=decodes, tokens=tokens, prompts=3)
        return frame and (frame.decodes, frame.tokens)

    assert rows(0, 8192) == (0, 8192)
    assert rows(90, 8000) == (96, 8096)
    assert rows(0, 1) == (0, 64)
    assert rows(33, 300) == (64, 512)
    assert rows(0, 1024) is None, "eight times its rows"
    assert rows(128, 6000) is None
    assert fitting_frame(frames, decodes=0, tokens=40, prompts=17) is None


def test_a_budget_without_room_for_prompts_has_no_frame_of_them():
    assert {frame.decodes for frame in mixed_frames(64, 64, 64)} == {0, 16, 32}


@pytest.mark.parametrize("slots", [1, 3, 32, 128])
def test_fewer_frames_still_serve_every_batch(slots):
    buckets, mixed = graph_buckets(slots), mixed_frames(slots, 1024, 64, paced=True)
    assert kept_frames(buckets, mixed, 1024, "all") == (buckets, mixed)
    few, some = kept_frames(buckets, mixed, 1024, "few")
    assert few[-1] == slots
    assert set(few) <= set(buckets)
    assert set(some) < set(mixed)
    assert {f.decodes for f in some if f.rows == 1024} == {f.decodes for f in mixed}
    assert kept_frames(buckets, mixed, 1024, "decodes") == (few, [])


@pytest.mark.parametrize(
    ("budget", "decodes", "tokens", "whole"),
    [
        (1024, 60, 790, 768),
        (1024, 60, 700, 640),
        (1024, 128, 896, 896),  # the whole budget
        (1024, 128, 895, 768),
        (1024, 60, 63, 63),  # below the smallest frame
        (1280, 120, 1000, 896),
        (1280, 120, 1100, 1024),
        (8192, 60, 1100, 1024),
        (8192, 60, 1500, 1408),  # beyond the frames: queued kernel by kernel
        (8192, 60, 850, 768),
    ],
)
def test_cuts_are_rounded_down_to_what_is_captured(budget, decodes, tokens, whole):
    sizes = FrameSizes(128, budget, 64, paced=True)
    assert sizes.whole_prompts(decodes, tokens) == whole


@pytest.mark.parametrize(
    ("detail", "paced", "wholes"),
    [
        ("few", True, {850: 512, 1000: 896, 1300: 1280, 1500: 1408}),
        ("all", False, {850: 512, 1000: 896, 1300: 1280, 1500: 1408}),
        ("decodes", True, {850: 850, 1000: 896, 1300: 1280, 1500: 1408}),
    ],
)
def test_where_fewer_sizes_are_captured_large_cuts_are_queued(detail, paced, wholes):
    sizes = FrameSizes(128, 8192, 64, paced=paced)
    sizes.keep(detail)
    assert {tokens: sizes.whole_prompts(60, tokens) for tokens in wholes} == wholes


def test_the_frames_that_are_kept_are_captured_the_largest_first_and_serve():
    sizes = FrameSizes(32, 256, 64)
    kept = sizes.keep("few")
    assert [frame.rows for frame in kept] == sorted((frame.rows for frame in kept), reverse=True)
    assert set(kept) == {*map(Frame, sizes.buckets), *sizes.mixed} < {
        *map(Frame, graph_buckets(32)), *mixed_frames(32, 256, 64),
    }  # fmt: skip
    assert sizes.fitting(decodes=9, tokens=0, prompts=0) == Frame(12)
    assert sizes.fitting(decodes=9, tokens=100, prompts=1) in sizes.mixed
    assert sizes.padded_decodes(9) == 16


@pytest.mark.parametrize("detail", ["all", "few", "decodes"])
def test_what_is_kept_is_kept_when_it_is_asked_for_again(detail):
    """A start goes through the frames twice: to have kernels compiled, and to capture."""
    sizes = FrameSizes(128, 1024, 64, paced=True)
    kept = sizes.keep(detail)
    assert sizes.keep(detail) == kept
    fresh = FrameSizes(128, 1024, 64, paced=True)
    fresh.keep(detail)
    assert (sizes.buckets, sizes.mixed) == (fresh.buckets, fresh.mixed)


def test_without_frames_of_prompts_no_decode_is_padded():
    sizes = FrameSizes(32, 256, 64)
    assert all(not frame.tokens for frame in sizes.keep("decodes"))
    assert [sizes.padded_decodes(n) for n in (0, 9, 32)] == [0, 9, 32]
    assert sizes.fitting(decodes=9, tokens=64, prompts=1) is None
