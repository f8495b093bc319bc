"""What `TRACE` on the command line means: a profile's name or a file."""

from __future__ import annotations

from pathlib import Path

from tailrace.bench.traffic import profiles
from tailrace.bench.traffic.azure_conv import AZURE_CONV
from tailrace.bench.traffic.presets import PRESETS
from tailrace.bench.traffic.profile import Profile, draw, draw_until
from tailrace.bench.traffic.schedule import Schedule, Shape, plan
from tailrace.bench.traffic.trace import read_trace
from tailrace.errors import ConfigError, nearest

PROFILES = {profile.name: profile for profile in (AZURE_CONV, *profiles.ALL)}


def schedule_for(trace: str, shape: Shape, *, seed: int) -> Schedule:
    """Return the run's requests from a profile (`seed` chooses them) or a trace file.

    Raises:
        ConfigError: No such profile or file, a bad row, or nothing left to send.
    """
    if trace in PROFILES:
        return _from_profile(PROFILES[trace], shape, seed)
    file = Path(trace)
    if not file.is_file():
        hint = nearest(trace, PROFILES)
        if trace in PRESETS:
            hint = "; a preset has no times of its own: `tailrace bench run` takes it, with --rate"
        raise ConfigError(
            f"{trace}: neither a trace file nor a profile ({', '.join(PROFILES)}){hint}"
        )
    found = read_trace(file)
    left_out = f", {found.left_out} rows of zero tokens left out" if found.left_out else ""
    prefixes = f", prefixes shared in blocks of {found.block_tokens}" if found.block_tokens else ""
    facts = f"{found.format} format, {len(found.arrivals)} requests{left_out}{prefixes}"
    source = f"{file.name} ({facts})"
    return plan(found.arrivals, shape, source=source, block_tokens=found.block_tokens)


def _from_profile(profile: Profile, shape: Shape, seed: int) -> Schedule:
    source = f"profile {profile.name}, seed {seed}: {profile.source}"
    if shape.duration_s is not None:
        drawn = draw_until(profile, seed=seed, end_s=shape.duration_s * shape.rate_scale)
    elif shape.max_requests is not None:
        endless = draw(profile, seed=seed)
        drawn = [next(endless) for _ in range(shape.max_requests)]
    else:
        raise ConfigError(
            f"profile {profile.name} has no end: say how long with --duration or --max-requests"
        )
    block_tokens = profile.prefixes.block_tokens if profile.prefixes else 0
    return plan(drawn, shape, source=source, block_tokens=block_tokens)
