"""Test cases: lists of cases, covering arrays, and inputs."""
