"""The grouped_tma path: persistent grouped GEMMs over expert-sorted rows, with TMA (sm_90)."""
