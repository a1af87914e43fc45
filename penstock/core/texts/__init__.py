"""Texts as bytes and as subword tokens."""
