"""Rows moved into the order of experts, and an activation beside it."""
