"""Grouped GEMMs over rows that are sorted by expert: the steps that several paths share, and a
Triton version for any GPU.
"""
