"""Transfer plans, which define the bytes that a local rank reads from each remote rank."""
