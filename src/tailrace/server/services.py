"""What every route may use, made once at start."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tailrace.clock import monotonic
from tailrace.server.admission import MOST_RETRY_S, Admission
from tailrace.server.auth import KeyRing
from tailrace.server.outbox import Outbox
from tailrace.telemetry.rates import RateWindow

if TYPE_CHECKING:
    from tailrace.access import KeyHolder
    from tailrace.config import Config
    from tailrace.server.engine_client import EngineClient
    from tailrace.telemetry.metrics import Metrics
    from tailrace.telemetry.request_log import RequestLog
    from tailrace.text.chat import ChatTemplate
    from tailrace.text.grammar import GrammarCompiler
    from tailrace.text.tokenizer import Tokenizer
    from tailrace.text.tool_calls import ToolStyle


@dataclass
class TextServices:
    """What the model's folder brings; known only once the engine has found it."""

    model_name: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    grammars: GrammarCompiler | None = None
    """Checks what clients ask for; None: no structured output."""
    tool_style: ToolStyle | None = None
    """How the model writes calls; None: it is not known to write any."""
    calls_are_text: bool = False
    """The operator wants calls left as the model wrote them (--tool-call-parser none)."""


@dataclass
class Services:
    """Settings, engine, telemetry, and the model's text side.

    Attributes:
        config: The settings of this process.
        engine: The way to the engine process.
        metrics: The Prometheus families.
        request_log: One record a request.
        text: None until the model's folder is known.
        draining: Set by SIGTERM: no new request is admitted.
        admission: Counts the sequences in the house.
        keys: Of clients.
        outbox: Orders what goes out to streams.
        started_s: Monotonic seconds at which the server began.
        started_unix_s: The same moment's wall clock.
        rates: How busy the engine was lately.
        family: Process ids by role, where there are several front ends.
        frontend_restarts: How often one of those was started again.
    """

    config: Config
    engine: EngineClient
    metrics: Metrics
    request_log: RequestLog
    started_s: float
    started_unix_s: float = field(default_factory=time.time)
    rates: RateWindow = field(default_factory=RateWindow)
    text: TextServices | None = None
    draining: bool = False
    admission: Admission = field(init=False)
    keys: KeyRing = field(init=False)
    outbox: Outbox = field(default_factory=Outbox)
    family: dict[str, int] = field(default_factory=dict)
    frontend_restarts: int = 0

    def __post_init__(self) -> None:
        self.admission = Admission(self._place_free_s)
        self.keys = KeyRing(self.config.server.api_key, self.config.access)

    def _place_free_s(self) -> float | None:
        stats = self.engine.stats
        if stats is None or stats.place_free_s is None:
            return None
        return min(MOST_RETRY_S, max(0.0, stats.time_s + stats.place_free_s - monotonic()))

    def cache_scope(self, holder: KeyHolder | None) -> str:
        """Return what the prefix-cache salts of a key's requests begin with; "": they share.

        Whatever salts bodies ask for, no salt of one scope is one of another.

        Args:
            holder: Whose key a request brought; None: the one without a name, or none.
        """
        if self.config.server.share_prefix_cache or not self.keys.are_several:
            return ""
        name = "" if holder is None else holder.name
        return f"{len(name)}:{name}:"

    @property
    def places(self) -> int:
        """How many sequences may run or wait at once."""
        return self.config.engine.max_batch_size + self.config.server.max_waiting
