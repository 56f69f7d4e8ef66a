"""The scheduler: requests in, schedules and events out. Standard library only; time is an argument."""
