"""Timelines of requests and steps, and the only formulas over them."""
