"""GPU behavior in Triton's CPU interpreter: numerics, narrow dtypes, bounds and race checks.

Tests run the project's Triton kernels with TRITON_INTERPRET=1. `patch` installs the replacements in
the interpreter.
"""
