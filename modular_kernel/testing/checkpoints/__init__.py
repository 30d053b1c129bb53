"""Tiny checkpoints of published families and formats, beside the float64 truth of what they say."""
