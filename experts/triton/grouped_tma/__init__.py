"""The grouped_tma path: persistent grouped GEMMs over rows sorted by expert, with TMA (sm_90)."""
