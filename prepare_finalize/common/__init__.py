"""Code shared by parts over ranks: the process group, agreement between ranks, packed rows."""
