"""Parts over the kernels of DeepEP: high-throughput, low-latency, and those of version 2."""
