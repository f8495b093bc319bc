"""Tailrace: an LLM inference server for online traffic, and the harness that proves it."""

__version__ = "0.1.0"
