"""What arrives at a server, and when: traces, scenarios, arrivals. Shared by simulator and load generator."""
