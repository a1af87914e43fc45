"""Localisation and classification in driving scenes."""
