"""Timing, roofline, correctness checks and records, shared by select, tune, profile and bench."""
