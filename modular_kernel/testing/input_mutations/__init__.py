"""Input mutations: wrong arguments, steps and outputs of calls, which the checks must detect.

An input mutation changes the tensors of a call and leaves the source code alone (`mutation` changes
source code). It imitates a defect of an exchange or experts component ("part"), such as skipped
tokens. If all checks pass with it, the checks have a gap. `run.sensitivity` and `mk test --mutate`
run them.
"""
