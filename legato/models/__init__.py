"""Model specifications, loaders and the decoder."""
