"""Timing, rooflines, correctness checks and records, shared by select, tuning, profiling, bench."""
