"""Analytic performance model of a layer on any number of ranks, for `mk plan`.

The time of a layer is the sum of dispatch, experts and combine. `load` computes the expected load
of the busiest rank, `experts_time` and `exchange_time` compute the times, `experts_records`
corrects them by measured times, and `memory` computes the memory. `estimate` combines them for
every valid pairing, and `recommend` selects a pairing. `compare`, `error_tables` and
`selection_table` compare the model with measurements, and create the tables of the documentation.
`accuracy` describes how well an estimate is known, from the same comparisons.
"""
