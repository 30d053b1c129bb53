"""Exchange by FlashInfer's one-sided all-to-all."""
