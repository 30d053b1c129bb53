"""Launch replay: kernel launches are recorded once and replayed by later calls."""
