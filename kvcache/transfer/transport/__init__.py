"""Transports, which move bytes of registered memory between the processes of two engines."""
