"""Exchange components ('parts') over DeepEP: high-throughput, low-latency, and version 2."""
