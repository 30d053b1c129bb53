"""Compatibility: declared capabilities of parts, rules that judge a pair, and verdicts."""
