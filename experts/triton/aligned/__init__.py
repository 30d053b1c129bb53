"""The aligned path: pairs sorted into blocks of one expert, two grouped GEMMs, sum over top-k."""
