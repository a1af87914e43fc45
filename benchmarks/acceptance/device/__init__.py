"""Devices: `penstock watch`, the offline web app and the cost of a pack."""
