"""One process: nothing is exchanged."""
