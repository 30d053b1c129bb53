"""Layers: what stands above a kernel. The router, FusedMoE, EPMoE, and the balance of experts."""
