"""Steps under the names that other projects give them."""
