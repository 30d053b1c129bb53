"""Run functions on several ranks: in a pool of processes, or on ranks that a launcher started."""
