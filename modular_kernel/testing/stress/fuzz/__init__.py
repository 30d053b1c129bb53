"""Random valid and invalid input for everything public, and what must come of it.

    python -m modular_kernel.testing.stress.fuzz --count 2000    # a line per finding
    python -m modular_kernel.testing.stress.fuzz --seed 7 --only 1234 # one again

A configuration is a seed and a number: `targets` draws a call of the public surface from them, and
`outcome` names what came of it. Results are held against `oracle`, which shares no code with
modular_kernel.reference. `runs` keeps a process that may crash or hang apart from the one that
counts.
"""
