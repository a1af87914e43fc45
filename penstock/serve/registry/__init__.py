"""Served models by name, with their replicas and the tables attached to them. No torch."""
