"""What `mk tune` tries: candidates, and how the best is found and kept."""
