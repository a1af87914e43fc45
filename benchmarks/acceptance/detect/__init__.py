"""Figures of the detector of road scenes."""
