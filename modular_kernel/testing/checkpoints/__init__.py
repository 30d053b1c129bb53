"""Tiny checkpoints of published families and formats, with their exact values in float64."""
