"""Dispatch and combine with FlashInfer's one-sided all-to-all."""
