"""Exchange component ('part') over FlashInfer's one-sided all-to-all."""
