"""Documents as HTML files in one style, and the drawings in them: `mk report` and `mk profile`."""
