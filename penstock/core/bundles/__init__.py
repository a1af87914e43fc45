"""Bundles as files, their golden examples and their applications."""
