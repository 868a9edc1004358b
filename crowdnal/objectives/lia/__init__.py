"""LIA and LIA-ML: a confusion for every pair of an item and an annotator."""
