"""Integrations of kvcache into other engines. Each is imported by its own name."""
