"""Stress tests: random input (`fuzz`), faults of ranks (`fault_matrix`), and long runs (`soak`).

The test suite runs short ones; `python -m modular_kernel.testing.stress.fuzz`,
tools/fault_matrix.py and tools/soak.py run longer ones.
"""
