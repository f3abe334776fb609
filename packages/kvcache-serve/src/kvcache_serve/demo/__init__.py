# SPDX-License-Identifier: Apache-2.0
"""The demo: serves chats with a real model from a small pool, and compares them with a dense cache."""

from kvcache_serve.demo.chats import Chat, Turn, make_chats, make_text_chats
from kvcache_serve.demo.report import DemoReport, report_table, summary, transcript
from kvcache_serve.demo.serve_chats import Course, serve_chats

__all__ = [
    "Chat",
    "Course",
    "DemoReport",
    "Turn",
    "make_chats",
    "make_text_chats",
    "report_table",
    "serve_chats",
    "summary",
    "transcript",
]
