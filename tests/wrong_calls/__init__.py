"""Public calls with random invalid and hostile arguments: `python -m tests.wrong_calls`."""
