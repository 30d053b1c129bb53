"""HTML pages and SVG figures of `mk report` and `mk profile`."""
