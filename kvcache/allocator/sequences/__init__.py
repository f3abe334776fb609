"""Requests that are groups of sequences, as objects of the engine."""
