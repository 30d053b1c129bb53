"""`mk bench`: times several layers in one run, and verifies each layer before it is timed."""
