# SPDX-License-Identifier: Apache-2.0
"""OpenAI-compatible completion endpoints for the engine, and a page that visualizes the cache.

This is a reference implementation, not a production server: it runs in one process, serves one
model and supports at most one API key. Requires the optional dependencies in the extra `serve`
(`pip install 'torch-kvcache[serve]'`).
"""

from kvcache.server.app import make_app
from kvcache.server.engine_loop import EngineLoop
from kvcache.server.limits import Limits
from kvcache.server.server import Server
from kvcache.server.texts import ByteTexts, Texts, TokenizerTexts

__all__ = ["ByteTexts", "EngineLoop", "Limits", "Server", "Texts", "TokenizerTexts", "make_app"]
