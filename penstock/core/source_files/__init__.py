"""The source files of applications: found, hashed, compared and imported."""
