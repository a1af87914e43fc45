"""The networks that the applications and benchmarks use."""
