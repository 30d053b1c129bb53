"""Operations shared by several parts. Each has a Triton kernel and a torch reference.

A pair is one token with one of its K experts. Pair p of a routing (T, K) belongs to token p // K.
Pairs with the id -1, and pairs of experts on other ranks, are skipped.
"""
