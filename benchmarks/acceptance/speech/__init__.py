"""Figures of speech: live streams while engines are killed, and what other services' protocols cost."""
