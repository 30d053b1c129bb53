"""What tests of compiled models may ask of this torch: one graph with experts, or a break."""

import pytest

TRACES = True

# `fullgraph=TRACES`: without it a graph breaks at a call of experts, and computes the same.
in_one_graph = pytest.mark.skipif(
    not TRACES, reason="torch before 2.13 traces no call of experts: its graph breaks there"
)
