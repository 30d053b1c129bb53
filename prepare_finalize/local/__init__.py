"""Parts for a single process, without communication."""
