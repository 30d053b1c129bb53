"""Helpers without knowledge of layers: argument and tensor checks, optional packages, JSON, fork safety."""
