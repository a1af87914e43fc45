"""Networks on a GPU: precision, CUDA graphs, compiled batches."""
