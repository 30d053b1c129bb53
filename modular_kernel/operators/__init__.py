"""Operators of torch for calls of a layer, which torch.compile and torch.export do not look into."""
