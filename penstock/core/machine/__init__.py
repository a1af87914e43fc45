"""This machine: its cores and processes, and what is installed on it."""
