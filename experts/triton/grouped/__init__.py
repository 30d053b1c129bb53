"""Grouped GEMMs over rows that are sorted by expert."""
