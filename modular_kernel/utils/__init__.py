"""Utilities: argument and tensor checks, optional packages, JSON files, fork safety."""
