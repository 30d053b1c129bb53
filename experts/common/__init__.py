"""The steps around the two grouped GEMMs, shared by the parts that call other libraries."""
