"""What parts over other people's products share: the steps around two grouped GEMMs."""
