"""What `tools/peer_suites.py` is made of: one module for each thing that is compared."""
