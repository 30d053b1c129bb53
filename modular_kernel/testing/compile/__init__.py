"""Compile every kernel without a GPU and read what the compiler reports."""
