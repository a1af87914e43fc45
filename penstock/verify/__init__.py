"""Compare a bundle's backends: the largest differences between their answers to the same inputs."""
