"""Chains of applications: declaration, checks and run."""
