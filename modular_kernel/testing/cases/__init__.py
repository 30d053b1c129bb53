"""Test cases: the lists of cases, the covering arrays behind them, and their inputs."""
