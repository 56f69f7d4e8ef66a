"""The command line: the only reader of arguments and environment."""
