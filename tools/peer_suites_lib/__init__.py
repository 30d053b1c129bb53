"""Implementation of `tools/peer_suites.py`, with a module for each kind of comparison."""
