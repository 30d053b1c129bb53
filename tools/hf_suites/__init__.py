"""Runs of transformers' own tests, and of checkpoints by real packers, on our parts."""
