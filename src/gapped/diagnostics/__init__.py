"""Measuring estimators: moments of gradients, and what follows from them."""
