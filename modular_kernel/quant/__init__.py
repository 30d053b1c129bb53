"""Quantized weights: the tensors of each scheme, scale layouts, repacking and preparation."""
