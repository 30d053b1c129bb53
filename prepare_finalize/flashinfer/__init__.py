"""Part over FlashInfer's one-sided all-to-all."""
