"""Mutants of a call: defects put into arguments and outputs, which the checks must notice."""
