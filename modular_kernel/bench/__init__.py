"""`mk bench`: layers beside each other in one run, each checked before it is timed."""
