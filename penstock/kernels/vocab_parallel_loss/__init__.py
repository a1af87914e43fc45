"""Vocab-parallel cross-entropy: the sums of each row over one process's classes, and the logits' gradient."""

from penstock.kernels.vocab_parallel_loss.dispatch import class_gradient, class_sums

__all__ = ["class_gradient", "class_sums"]
