"""Estimators whose sample carries the gradient: one file each."""
