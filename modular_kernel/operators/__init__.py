"""Custom torch operators for layer calls, opaque to torch.compile and torch.export."""
