"""Run functions on ranks: on a pool of processes, or on the ranks that a launcher started."""
