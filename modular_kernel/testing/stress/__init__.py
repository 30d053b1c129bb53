"""Stress tests: random input, faults over ranks, and long runs."""
