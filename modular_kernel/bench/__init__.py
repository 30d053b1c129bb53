"""`mk bench`: timings of several layers in one run, each verified before it is timed."""
