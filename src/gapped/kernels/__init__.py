"""Triton twins of the pathwise estimators; imported only when used."""
