"""What fleets are trained on: one package per task."""
