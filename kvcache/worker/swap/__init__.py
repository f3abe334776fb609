"""Page copies between device and host that overlap with computing, and their bandwidth."""
