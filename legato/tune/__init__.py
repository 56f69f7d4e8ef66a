"""Finds the settings for a machine, a model and a load: measured costs, simulated traffic, a check."""
