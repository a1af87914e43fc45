"""Results, the best peer, and docs/performance.md."""
