"""Persistent grouped GEMMs over rows in the order of experts, fed by TMA (sm_90)."""
