"""Costs that come with Legato, for who has measured none."""
