"""Specs, applications, bundles, packs, errors: the base of every other package. NumPy only, never torch."""
