"""Adapters to model libraries (each requires the extra of its name), and functional interfaces."""
