"""Parts without communication, for a single rank."""
