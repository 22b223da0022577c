"""The discrete variational autoencoder."""
