"""OpenAI's completion endpoints over the engine, and a page that shows the cache at work.

A reference and a lens, not a production server: one process, one model, no authentication.
Needs the packages of the extra `serve`.
"""

from kvcache.serve.app import make_app
from kvcache.serve.engine_loop import EngineLoop
from kvcache.serve.limits import Limits
from kvcache.serve.server import Server
from kvcache.serve.texts import ByteTexts, Texts, TokenizerTexts

__all__ = ["ByteTexts", "EngineLoop", "Limits", "Server", "Texts", "TokenizerTexts", "make_app"]
