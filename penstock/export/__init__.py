"""Export a bundle as a pack: its graph, checked against the bundle, and the files that a device needs beside it."""
