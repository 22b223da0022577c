"""Estimators that need the cost of each sample: one file each."""
