"""Building blocks that torch lacks."""
