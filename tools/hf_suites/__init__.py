"""Runs transformers' own tests, and checkpoints from quantization libraries, on our parts."""
