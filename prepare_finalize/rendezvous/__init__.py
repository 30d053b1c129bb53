"""How ranks meet, agree and learn that one of them failed."""
