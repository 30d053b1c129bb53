"""Exchange by DeepEP."""
