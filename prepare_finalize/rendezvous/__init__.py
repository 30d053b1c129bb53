"""Rendezvous of ranks: connecting, comparing properties, and finding the cause of failures."""
