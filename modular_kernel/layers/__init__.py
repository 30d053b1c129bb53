"""Modules built on a kernel: Router, FusedMoE, EPMoE, LoRA layers, weight loading, balancing."""
