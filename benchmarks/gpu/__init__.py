# SPDX-License-Identifier: Apache-2.0
"""`make gpu`: builds, checks and measures on a machine with an NVIDIA GPU in under ten minutes.

`python3 -m benchmarks.gpu --help`. Uses the machine's python3 and packages, installs nothing, and needs
no network. docs/measuring.md describes the stages.
"""
