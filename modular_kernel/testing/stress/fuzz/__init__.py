"""Fuzzing of the public API with random valid and invalid input.

    python -m modular_kernel.testing.stress.fuzz --count 2000          # prints the findings
    python -m modular_kernel.testing.stress.fuzz --seed 7 --only 1234  # repeats one configuration

- `targets` lists the targets. A target consists of a Hypothesis strategy for inputs, and a check
  that makes a call and classifies its outcome (`outcome`).
- A configuration is one input of one target. Hypothesis draws it from bytes that depend only on the
  seed and on the number of the configuration. Hypothesis also shrinks failing inputs, and saves
  them in .hypothesis/examples for later runs (`properties`).
- Outputs are compared with `independent_reference`, which shares no code with
  modular_kernel.reference.
- `isolated_runs` runs configurations in a separate process, which may crash or hang.
"""
