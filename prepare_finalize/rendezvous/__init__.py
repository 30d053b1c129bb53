"""Rendezvous of ranks: connecting, agreeing on facts, and diagnosing failures."""
