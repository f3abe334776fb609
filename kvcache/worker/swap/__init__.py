"""Copies pages between device and host during computation, and benchmarks these copies."""
