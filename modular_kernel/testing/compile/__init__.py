"""Compile every Triton kernel without a GPU, and check the compiler's report of its resources.

Used by `mk compile` and the tests in tests/compile.
"""
