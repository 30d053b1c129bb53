"""Search for a part's launch configurations by measurement, as run by `mk tune`."""
