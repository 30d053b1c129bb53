"""Selection of launch configurations: overrides, tuned files, nearest tuned layers, defaults."""
