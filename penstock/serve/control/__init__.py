"""Processes: the supervisor, its children, their messages. No torch."""
