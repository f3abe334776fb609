"""Page copies between device and host beside the computing, and how fast they are."""
