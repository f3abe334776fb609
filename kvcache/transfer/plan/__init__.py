"""Transfer plans: which bytes a local rank reads from which remote rank."""
