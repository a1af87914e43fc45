"""Sweeps: many trainings of one application with settings chosen by Optuna."""
