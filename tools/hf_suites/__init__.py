"""Cases of transformers' own suite and of real packers, run on our parts."""
