"""The `mk` command. A subcommand such as `mk check` is called a verb, and has a module of its own.

Verbs import torch and rich inside their functions, so that `mk --help` is fast.
"""
