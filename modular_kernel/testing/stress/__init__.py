"""Stress tests: random input (`fuzz`), faults of ranks (`fault_matrix`), and long runs (`soak`).

The test suite runs short versions of them. `python -m modular_kernel.testing.stress.fuzz`,
tools/fault_matrix.py and tools/soak.py run longer versions.
"""
