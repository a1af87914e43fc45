"""Spoken digits and commands in live sound."""
