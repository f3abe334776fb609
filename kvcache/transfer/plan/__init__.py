"""Who reads which bytes from whom: the fragments of two engines' caches, and their plan."""
