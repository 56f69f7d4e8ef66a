"""The real scheduler under a clock that a formula moves: hours of traffic in seconds, without a model."""
