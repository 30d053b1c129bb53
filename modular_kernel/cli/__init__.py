"""The `mk` command, one module per verb.

Verbs import torch and rich inside their functions, so that `mk --help` is fast.
"""
