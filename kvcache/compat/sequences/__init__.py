"""Block management for groups of sequences, which are objects of the engine."""
