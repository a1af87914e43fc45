"""A bundle into a pack: one graph, checked against the bundle, with all that a device needs beside it."""
