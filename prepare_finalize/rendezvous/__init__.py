"""Rendezvous of ranks: connect, compare properties through a store, and find the failed ranks."""
