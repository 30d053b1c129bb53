"""Adapters to model libraries, each needing the extra of its name, and the field's functions."""
