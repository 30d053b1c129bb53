"""A persistent pool of processes that act as ranks."""
