"""Estimators inside of other libraries: a file for each, which imports the library that it is named after."""
