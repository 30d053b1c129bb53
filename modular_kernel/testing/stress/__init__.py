"""Random input, faults over ranks, and long runs."""
