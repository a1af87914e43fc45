"""A bundle made runnable: the network loaded, checked against its golden examples, and stepped in batches."""
