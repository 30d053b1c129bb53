"""Two-level exchange: torch.distributed between hosts, and shared memory within each host."""
