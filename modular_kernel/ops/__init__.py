"""Operations that several parts use. Most have a Triton kernel and a torch reference.

A pair is a token together with one of its K experts. Pair p of a routing (T, K) belongs to token
p // K. Pairs with the id -1, and pairs whose experts are on other ranks, are skipped.
"""
