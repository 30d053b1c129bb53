"""`mk profile`: traces of a call, and what its stages took beside what they cannot beat."""
