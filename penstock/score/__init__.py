"""Scoring of whole folders: `penstock score`, and `penstock.scorer` for Spark's `mapInArrow`.

The unit of work is a part of the input: a row group, some files, a range of lines. Its output is a file that is named
by the hash of the bundle, the input and the part, so that a part that is run twice gives the same file.
"""
