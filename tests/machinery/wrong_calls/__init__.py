"""Random wrong and hostile arguments to public calls: `python -m tests.machinery.wrong_calls`."""
