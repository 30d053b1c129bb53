"""Selection of a pairing by measurement: candidates, timing, cache, and the composed layer."""
