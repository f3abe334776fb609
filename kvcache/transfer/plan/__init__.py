"""Transfer plans: the bytes that a local rank reads from each remote rank."""
