"""Specifications as frozen data: the problem, quantization, routing, placement and LoRA."""
