"""The server: start, tick, drain, and a long load with killed processes."""
