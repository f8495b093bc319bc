"""The compiled kernels: their C source, and how it becomes a library on this machine."""
