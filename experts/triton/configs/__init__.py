"""Selection of launch configurations: overrides, tuned files, nearest layers, heuristics."""
