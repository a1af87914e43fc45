"""Mitotic figures in stained histology slides."""
