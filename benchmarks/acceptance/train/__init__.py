"""Training: throughput, accuracy, parity, resuming and checkpoints."""
