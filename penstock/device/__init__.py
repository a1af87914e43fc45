"""Packs on a device: ONNX Runtime, NumPy, PyAV and Pillow, never torch."""
