"""The laboratory: recipes to run specs, run specs to fleets, fleets to records."""
