"""Causal attention of each row over its sequence's paged keys and values."""
