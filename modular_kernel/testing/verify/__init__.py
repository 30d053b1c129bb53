"""Runs cases against the float64 reference, in one process and over ranks."""
