"""Fuzzing of the public API with random valid and invalid input.

    python -m modular_kernel.testing.stress.fuzz --count 2000    # a line per finding
    python -m modular_kernel.testing.stress.fuzz --seed 7 --only 1234 # one again

A configuration is a seed and a number, from which `targets` draws a call of the public API;
`outcome` classifies its result. Outputs are compared with `oracle`, which shares no code with
modular_kernel.reference. `isolated_runs` runs configurations in a separate process, which may crash
or hang.
"""
