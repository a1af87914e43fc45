"""Examples, the order in which they are seen, and how batches reach the device."""
