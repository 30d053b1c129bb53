"""Analytic performance model of a layer on any number of ranks, for `mk plan`.

The time of a layer is the sum of dispatch, experts and combine. `load` computes the expected load
of the busiest rank, `experts_time` and `exchange_time` the times, `experts_records` corrections by
measured times, and `memory` the memory. `estimate` combines them for every valid pairing, and
`recommend` selects one. `compare`, `error_tables` and `selection_table` compare the model with
measurements, and make the tables of the documentation.
"""
