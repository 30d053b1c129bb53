"""Fuzzing of the public API with random valid and invalid input.

    python -m modular_kernel.testing.stress.fuzz --count 2000    # a line per finding
    python -m modular_kernel.testing.stress.fuzz --seed 7 --only 1234 # one again

`targets` lists the targets: each is a Hypothesis strategy for inputs and a check that classifies
the result (`outcome`). Hypothesis makes the input of a configuration from bytes, which follow from
the seed and the configuration's number. It also shrinks failing inputs, and saves them in
.hypothesis/examples for later runs (`properties`). Outputs are compared with `oracle`, which shares
no code with modular_kernel.reference. `isolated_runs` runs configurations in a separate process,
which may crash or hang.
"""
