"""PrepareAndFinalize components ('parts') without communication, for a single rank."""
