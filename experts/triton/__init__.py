"""Experts in Triton: three parts, and the paths by which a call of TritonExperts may go."""
