"""Runs cases against the float64 oracle, in one process and over ranks."""
