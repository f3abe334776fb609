"""Requests that are groups of sequences: an engine's own objects, over the same blocks."""
