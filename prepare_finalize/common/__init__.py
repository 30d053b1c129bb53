"""Code shared by parts over ranks: process groups, handshakes, and the layout of exchanged rows."""
