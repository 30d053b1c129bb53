"""Checks of the experts classes of a serving engine with our cases, reference and tolerance.

A worker process loads the engine and runs one case at a time. If it crashes or exceeds a time
limit, another process runs the remaining cases.
"""
