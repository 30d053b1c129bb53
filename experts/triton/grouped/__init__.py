"""Grouped GEMMs over expert-sorted rows, on any GPU, and the steps that they share with other
paths.
"""
