"""Figures of several servers together: real ones behind proxies, and a simulated fleet."""
