"""Rows gathered through an alignment: two grouped GEMMs over blocks of pairs, then a sum."""
