"""`mk profile`: traces of a call, and stage times compared with their roofline."""
