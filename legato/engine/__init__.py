"""The loop that joins the core to a runner, and the ways to talk to it."""
