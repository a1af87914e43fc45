"""Processes and models: the supervisor, its children, their messages, the model repository. No torch."""
