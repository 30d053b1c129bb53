"""Two-level exchange component: torch.distributed between hosts, shared memory within each host.

A row is sent once to each host that needs it, to the rank there with the same local rank (the index
of a rank on its host). The receiving rank forwards the row to the ranks of its host.
"""
