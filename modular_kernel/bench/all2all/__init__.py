"""Time dispatch and combine over ranks, ours beside baselines."""
