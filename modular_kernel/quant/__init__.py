"""Quantized weights: tensors of each scheme, scale layouts, repacking and preparation."""
