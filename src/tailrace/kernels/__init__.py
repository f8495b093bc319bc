"""The device's operations: each has a PyTorch reference and, beside it, a faster equal.

`kernels.Kernels` is what models and the runner call; `select.select` picks who answers.
"""
