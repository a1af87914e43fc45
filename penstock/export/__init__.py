"""Export a bundle as a pack: one graph, checked against the bundle, and the files that a device needs beside it."""
