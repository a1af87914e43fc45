"""Reports of runs: progress, metrics, curves, comparison."""
