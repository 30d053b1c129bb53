"""Which MoE layer a model has: read from its config.json, or looked up by its name."""
