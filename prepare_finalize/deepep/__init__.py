"""Dispatch and combine with DeepEP."""
