"""Random faults under load, and a check of the whole history."""
