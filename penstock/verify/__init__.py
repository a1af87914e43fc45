"""One bundle in all its places: the largest differences between their answers to the same inputs."""
