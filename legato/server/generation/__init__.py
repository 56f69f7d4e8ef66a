"""From a validated request to replies: parameters, constraints, prompts, and the format of the response."""
