"""Runs transformers' own tests, and checkpoints that quantization libraries pack, on our parts."""
