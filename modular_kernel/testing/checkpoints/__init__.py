"""Write tiny checkpoints of published model families and formats, with exact float64 values.

Tests load the checkpoints with `modular_kernel.checkpoints`, and compare outputs of their layers
with outputs that are computed from the exact values. `mk demo` also writes some of them.
`samples.write` writes safetensors files, and `gguf.write_gguf` writes GGUF files.
"""
