"""Operations shared by several parts; each has a kernel launch and a torch reference."""
