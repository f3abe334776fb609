"""Models and engines of others on `kvcache`: each integration is imported by its own name."""
