"""Matrix-vector products of a token's pairs, without tensor cores."""
