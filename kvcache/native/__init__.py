"""The native libraries: how they are built ahead of time, built at first use, and loaded."""
