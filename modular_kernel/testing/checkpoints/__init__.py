"""Write tiny checkpoints of published model families and formats, with exact float64 values.

Tests load them with `modular_kernel.checkpoints` and compare the layers' outputs with those
computed from the exact values. `mk demo` writes some, too. `samples.write` writes safetensors
files, `gguf.write_gguf` GGUF files.
"""
