"""Metrics, traces and logs. No torch."""
