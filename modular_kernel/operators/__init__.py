"""Torch operators for calls of a layer, which torch.compile and torch.export do not trace."""
