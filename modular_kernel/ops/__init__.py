"""Operations shared by several parts; each kernel has a torch reference beside it."""
