"""Input mutations: defects in arguments, steps and outputs of calls that the checks must detect."""
