"""Launch replay: the kernel launches of a call are recorded once and replayed by later calls."""
