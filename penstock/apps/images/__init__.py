"""Image classification: trained on a folder of class-named folders."""
