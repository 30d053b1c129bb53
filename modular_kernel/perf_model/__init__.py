"""Analytic performance model of a layer, for more ranks than this machine has."""
