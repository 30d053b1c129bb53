"""Compilation of every kernel without a GPU, with the compiler's resource report."""
