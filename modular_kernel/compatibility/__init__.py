"""Compatibility of parts: declared capabilities, the rules that check a pair, and verdicts."""
