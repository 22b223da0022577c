"""Time and memory of the estimators, beside torch's."""
