"""The next weight's bytes, asked for while a kernel that leaves memory idle runs."""
