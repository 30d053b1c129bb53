"""Timing, roofline, checks and records: what select, tune, profile and bench share."""
