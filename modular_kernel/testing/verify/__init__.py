"""Run a case and compare it with the oracle, in one process and over ranks."""
