"""Packs as files: signature, age, and the tensors and loops of their graphs."""
