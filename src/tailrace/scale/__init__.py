"""Several nodes; empty in this version."""
