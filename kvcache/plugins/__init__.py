# SPDX-License-Identifier: Apache-2.0
"""Integrations of kvcache into other engines. Each is imported by its own name."""
