"""Steps of a fused MoE layer, under the names that they have in other projects."""
