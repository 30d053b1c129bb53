"""Grouped GEMMs over expert-sorted rows on any GPU, and the steps shared with other paths."""
