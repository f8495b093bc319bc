"""Tailrace's parts inside other people's programs."""
