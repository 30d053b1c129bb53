"""Input mutations: wrong arguments, steps and outputs of calls, which the checks must detect.

An input mutation imitates a defect of an exchange or experts component ("part"), such as skipped
tokens, by changing the tensors of a call. It does not change source code, unlike `mutation`. If all
checks pass with it, the checks have a gap. `run.sensitivity` and `mk test --mutate` run the input
mutations.
"""
