"""The native libraries: built ahead of time or at first use, and loaded."""
