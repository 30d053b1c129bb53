"""The aligned path: pairs in blocks of one expert, two grouped GEMMs, sum over top-k.

It is the general path of TritonExperts, like vLLM's fused_moe.
"""
