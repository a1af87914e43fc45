"""Networks of bundles by ONNX Runtime: export, its cache, and executors."""
