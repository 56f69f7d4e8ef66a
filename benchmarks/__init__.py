"""Measurements that anyone can repeat; each is run with `python -m benchmarks.NAME`."""

import os

# As the command line does, and for its reason; it must be set before torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
