"""Quality of the translator's translations."""
