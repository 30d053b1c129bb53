"""Two-level exchange: torch.distributed between hosts, shared memory within each."""
