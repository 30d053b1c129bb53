"""Specifications as frozen dataclasses: the problem, quantization, routing, placement and LoRA."""
