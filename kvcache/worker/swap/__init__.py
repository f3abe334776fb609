"""Page copies between device and host that overlap with computation, and their bandwidth."""
