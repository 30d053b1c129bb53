"""Sizing: an analytic model of a layer's time, for worlds larger than this machine."""
