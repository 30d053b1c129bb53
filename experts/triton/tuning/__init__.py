"""Tuning of the Triton experts for `mk tune`: candidates, selection and storage."""
