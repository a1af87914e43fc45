"""Figures of `penstock score` and `penstock.scorer`."""
