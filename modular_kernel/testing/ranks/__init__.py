"""Processes that act as ranks: a persistent pool, or the ranks of a launcher."""
