"""Operators for calls of a layer: torch.compile and torch.export do not look into them."""
