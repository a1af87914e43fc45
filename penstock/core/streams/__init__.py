"""Live streams: their declaration, their segments, and the entries of those that share a connection."""
