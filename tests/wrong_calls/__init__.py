"""Public calls with wrong and hostile arguments, drawn at random: `python -m tests.wrong_calls`."""
