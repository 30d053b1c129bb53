"""Adapters between the toolkit and model libraries; each needs the extra of its name."""
