"""The public conformance suites against a server of our own: `make conformance`."""
