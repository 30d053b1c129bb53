"""The aligned path, which supports every layer. It is similar to vLLM's fused_moe."""
