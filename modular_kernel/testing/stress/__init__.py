"""Stress tests: random input, faults of ranks, and long runs."""
