# SPDX-License-Identifier: Apache-2.0
"""A small engine on kvcache, a server with an OpenAI-compatible API, and the demo."""
