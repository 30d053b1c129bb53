"""Steps of a fused MoE layer, under the names they have in other projects."""
