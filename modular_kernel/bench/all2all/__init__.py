"""Benchmarks of dispatch and combine over ranks, for our parts and for baselines."""
