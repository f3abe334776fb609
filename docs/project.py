# SPDX-License-Identifier: Apache-2.0
"""A hook of MkDocs: the site shows the version of the package and links its repository."""

from __future__ import annotations

import ast
from pathlib import Path

import griffe
import tomllib
from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the version to the title. Link the repository if pyproject.toml names one."""
    root = Path(config.config_file_path).parent
    package = griffe.load("kvcache", search_paths=[root], submodules=False)
    config.site_name = f"kvcache {ast.literal_eval(str(package['__version__'].value))}"
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    config.repo_url = project.get("urls", {}).get("Repository")
    return config
