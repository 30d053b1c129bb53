"""Lists of test cases, the covering arrays that select them, and their inputs."""
