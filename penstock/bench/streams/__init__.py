"""The load generator for live streams."""
