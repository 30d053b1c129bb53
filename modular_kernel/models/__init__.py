"""Sizes, router and quantization of a model's MoE layer, from a config.json or a model's name."""
