"""Builds the native libraries, ahead of time or at first use, and loads them."""
