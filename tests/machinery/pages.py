# SPDX-License-Identifier: Apache-2.0
"""The code in pages of the documentation."""

from __future__ import annotations

from pathlib import Path


def code_of(page: Path) -> str:
    """Return the Python blocks of a page, padded with empty lines so that line numbers match the
    page.
    """
    lines, inside = [], False
    for line in page.read_text().splitlines():
        fence = line.startswith("```")
        lines.append(line if inside and not fence else "")
        inside = line == "```python" if fence else inside
    return "\n".join(lines)
