"""The `mk` command, one file per verb. Verbs import torch and rich when they run: help is fast."""
