"""Compatibility of pairings: what parts declare, the rules that judge a pair, and verdicts."""
