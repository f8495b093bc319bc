"""Checkpoints and the models made of them."""
