"""The cost of an engine step: its shape, its predicted seconds, and how the prediction is learned."""
