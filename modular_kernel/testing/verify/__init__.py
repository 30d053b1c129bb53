"""Runs test cases and checks their results, in one process (`one_process`) and over ranks.

A `trial.Trial` makes the calls of a case and caches their results. A `sample.Sample` has the inputs
and expected output of one call. `checks` has one function per checked property.
"""
