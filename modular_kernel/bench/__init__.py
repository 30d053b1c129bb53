"""`mk bench`: timing of several layers in one run, each verified before it is timed."""
