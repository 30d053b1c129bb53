"""Selection of a pairing by measurement: candidates, timing, cache, and the composed layer.

A pairing is a PrepareAndFinalize class with an experts class; `mk.compose` selects one.
"""
