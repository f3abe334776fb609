"""Transports: how bytes of registered memory move between the processes of two engines."""
