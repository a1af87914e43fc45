"""What a cross-entropy needs of one process's part of the classes: each row's sums, and the scores' gradient."""

from penstock.kernels.class_scores.dispatch import class_gradient, class_sums

__all__ = ["class_gradient", "class_sums"]
