"""Bookkeeping of a KV connector: requests of a step, cache events, and the workers' reports merged."""
