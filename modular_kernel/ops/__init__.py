"""Operations used by two parts or more, each with a torch twin beside its kernel."""
