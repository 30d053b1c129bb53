"""Run functions on several ranks: in a pool of processes, or on ranks that a launcher started.

Tests over ranks, `mk test --world-size` and `mk exchange` use these.
"""
