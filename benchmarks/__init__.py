"""Measurements that anyone can repeat; each is run with `python -m benchmarks.NAME`."""
