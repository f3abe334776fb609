# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible completion endpoints for the engine, and a page that visualizes the cache.

This is a reference implementation, not a production server: it runs in one process, serves one
model and supports at most one API key. Requires the optional dependencies in the extra `serve`
(`pip install 'torch-kvcache[serve]'`).
"""

from kvcache_serve.server.app import make_app
from kvcache_serve.server.engine_loop import EngineLoop
from kvcache_serve.server.limits import Limits
from kvcache_serve.server.server import Server
from kvcache_serve.server.texts import ByteTexts, Texts, TokenizerTexts

__all__ = ["ByteTexts", "EngineLoop", "Limits", "Server", "Texts", "TokenizerTexts", "make_app"]
