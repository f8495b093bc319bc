from __future__ import annotations

import pytest

from tailrace.bench.complexity import RULES, complexity_of
from tailrace.bench.result import Contender, Platform


def scored(*, gpus=1, processes=None, **changes):
    contender = Contender(**({"name": "vllm", "engine": "vllm"} | changes))
    platform = Platform(name="here", machine={}, gpus=["H200"] * gpus)
    found = complexity_of(contender, platform, processes)
    return found.points, found.why


def test_one_plain_server_asks_for_nothing():
    command = ["vllm", "serve", "/models/draft-eagle", "--port", "1", "--model=/mtp"]
    assert scored(command=command, ready_s=[20.0, 61.0, 22.0], processes=3) == (0, ())


@pytest.mark.parametrize(
    ("changes", "points", "why"),
    [
        ({"gpus": 2}, 1, "2 GPUs (+1)"),
        ({"gpus": 8}, 3, "8 GPUs (+3)"),
        ({"processes": 5.0}, 1, "5 processes (+1)"),
        ({"ready_s": [61.0]}, 1, "61 s to start (+1)"),
        ({"ready_s": [301.0]}, 2, "301 s to start (+2)"),
        ({"restarts": 3}, 2, "died and was restarted: 3 (+2)"),
        (
            {"restarts": 1, "out_of_memory": 1},
            4,
            "died and was restarted: 1, out of memory: 1 (+4)",
        ),
        ({"strategy": "EAGLE-3, 5 drafts"}, 1, "a drafter to keep in step with the model (+1)"),
        ({"command": ["x", "--speculative-config", "{}"]}, 1, "a drafter to keep"),
        ({"command": ["llama-server", "--model-draft", "m.gguf"]}, 1, "a drafter to keep"),
        ({"command": ["x", "--kv-transfer-config={}"]}, 2, "servers of their own (+2)"),
        ({"strategy": "lmcache on NVMe"}, 1, "a KV store outside"),
        ({"command": ["x", *(f"--option-{n}" for n in range(9))]}, 1, "9 options (+1)"),
    ],
)
def test_each_rule_gives_its_points_and_says_why(changes, points, why):
    found, told = scored(**changes)
    assert found == points
    assert len(told) == 1
    assert why in told[0]


def test_points_add_up_and_every_rule_is_stated():
    points, why = scored(gpus=4, restarts=1, ready_s=[100.0], strategy="MTP")
    assert points == 2 + 2 + 1 + 1
    assert len(why) == 4
    assert len(RULES) == 6
