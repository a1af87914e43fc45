"""Thin adapters between the wire and the slot table. None of them loads torch."""
