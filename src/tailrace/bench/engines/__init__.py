"""Adapters: how each engine is started, known to be ready, asked, and read."""

from __future__ import annotations

from tailrace.bench.engines.adapter import Adapter
from tailrace.bench.engines.registry import adapter_for
from tailrace.bench.engines.server import EngineServer, start
from tailrace.bench.engines.spec import EngineSpec

__all__ = ["Adapter", "EngineServer", "EngineSpec", "adapter_for", "start"]
