"""Rendezvous of ranks: connect, compare properties through a store, find the ranks that failed."""
