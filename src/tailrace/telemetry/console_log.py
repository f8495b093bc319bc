"""The log on standard error, without what the program holds.

Where rich is installed, structlog writes the local variables of every function beside a traceback:
prompts, answers and keys would be in the log of any unforeseen error.
"""

from __future__ import annotations

import logging
import os
import sys

import structlog


def configure_log(level: str = "debug") -> None:
    """Log to standard error from a level on."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr)
    structlog.reset_defaults()
    *before, _ = structlog.get_config()["processors"]
    renderer = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty() and not os.environ.get("NO_COLOR"),
        exception_formatter=structlog.dev.plain_traceback,
    )
    structlog.configure(
        processors=[*before, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
