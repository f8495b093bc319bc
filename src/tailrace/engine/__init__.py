"""The engine: one process that owns the device, the KV cache and every running sequence."""
