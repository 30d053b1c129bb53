"""Checks the experts classes of a serving engine with our cases, reference and tolerance.

A worker process loads the engine and runs one case at a time. If the process crashes or a case
exceeds its time limit, a new process runs the remaining cases.
"""
