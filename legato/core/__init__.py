"""The pure core: requests in, schedules and events out. No clock, thread, device or log; stdlib only."""
