# SPDX-License-Identifier: Apache-2.0
"""Public calls with random invalid and hostile arguments: `python -m tests.machinery.wrong_calls`."""
