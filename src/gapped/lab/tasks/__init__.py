"""The tasks that fleets are trained on: the VAE and ListOps."""
