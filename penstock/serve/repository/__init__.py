"""The models of a server: which are loaded, in which state, and what is done with them. It knows no processes."""
