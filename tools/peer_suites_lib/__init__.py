"""Implementation of `tools/peer_suites.py`, with a module per kind of comparison."""
