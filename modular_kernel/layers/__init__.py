"""What stands above a kernel: router, FusedMoE, EPMoE, loading of weights, balance of experts."""
