"""Compile every kernel without a GPU, and check the compiler's report of its resources."""
