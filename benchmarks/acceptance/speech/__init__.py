"""Figures of speech: live streams while engines are killed."""
