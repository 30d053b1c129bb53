"""The MoE layer of a model: sizes, router and quantization, by config.json or by model name."""
