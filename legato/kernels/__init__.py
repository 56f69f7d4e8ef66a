"""Compiled arithmetic for CPUs: knows addresses and sizes, no tensors."""
