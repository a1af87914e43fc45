"""Training: a recipe, a loop that reads top to bottom, a bundle at the end."""
