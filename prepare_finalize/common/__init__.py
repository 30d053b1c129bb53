"""Code shared by exchange components ('parts'): process groups, handshakes, layouts of rows."""
