"""What is tried: lists of cases, the covering array behind them, and their inputs."""
