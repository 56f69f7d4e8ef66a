"""What an engine step costs: its shape, its predicted seconds, and how the prediction is learned."""
