"""The aligned path: two grouped GEMMs over blocks of aligned pairs, then a sum over top-k."""
