"""Named traffic: the loads of the two field reports that this project started from.

    longdoc   long documents with short answers: prompts of 300-6800 tokens (mean 4200, sd 1280),
              answers of 512; its closed loop is 128 users who wait 0.1-0.5 s
    chat70    chat: 70 % of prompts 32-128 tokens, 30 % 512-2048, answers of 256; its closed loop
              is 50 users who wait 0.1-2.0 s

As an open loop both are Poisson at a rate that must be given: a preset says what arrives, not how
much of it. Users are not a rate: 128 users who wait 0.3 s and then 3.2 s for an answer make 36
requests/s, not 128.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """Lengths and closed-loop habits, in the words of a `Workload`."""

    name: str
    about: str
    input_tokens: str
    output_tokens: str
    users: int
    think_s: str


LONGDOC = Preset(
    name="longdoc",
    about="long documents",
    input_tokens="normal:4200:1280:300:6800",
    output_tokens="512",
    users=128,
    think_s="0.1-0.5",
)
CHAT70 = Preset(
    name="chat70",
    about="chat, 70 % short and 30 % long prompts",
    input_tokens="mix:0.7@32-128,0.3@512-2048",
    output_tokens="256",
    users=50,
    think_s="0.1-2.0",
)
PRESETS = {preset.name: preset for preset in (LONGDOC, CHAT70)}
