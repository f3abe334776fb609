# SPDX-License-Identifier: Apache-2.0
"""Integrations of kvcache into other engines. Import each subpackage explicitly."""
