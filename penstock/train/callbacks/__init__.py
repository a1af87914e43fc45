"""Callbacks: code that is called with the events of a training."""
