"""Custom torch operators for layer calls; torch.compile and torch.export do not look into them."""
