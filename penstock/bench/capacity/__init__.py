"""Capacity of a fleet, simulated in NumPy: servers with measured costs, in many lanes that advance in lockstep."""
