"""Figures of the mitosis application."""
