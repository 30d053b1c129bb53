"""The `mk` command. Its subcommands are called verbs, and each verb has its own module.

Verbs import torch and rich inside their functions, so that `mk --help` is fast.
"""
