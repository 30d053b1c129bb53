"""Which configuration a call launches: overrides, tuned files, nearest layers, heuristics."""
