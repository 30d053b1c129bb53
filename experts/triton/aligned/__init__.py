"""The aligned path: pairs sorted into blocks of one expert, two grouped GEMMs, and a sum over
top-k.
"""
