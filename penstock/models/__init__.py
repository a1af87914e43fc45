"""Networks of the applications and benchmarks."""
