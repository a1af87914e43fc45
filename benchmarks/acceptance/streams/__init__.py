"""Live streams: leaks of state between streams, and the tick on a GPU."""
