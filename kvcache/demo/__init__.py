# SPDX-License-Identifier: Apache-2.0
"""The demo: serves chats with a real model from a small pool, and compares them with a dense cache."""

from kvcache.demo.chats import Chat, make_chats
from kvcache.demo.report import DemoReport, report_table, summary
from kvcache.demo.serve_chats import Course, serve_chats

__all__ = [
    "Chat",
    "Course",
    "DemoReport",
    "make_chats",
    "report_table",
    "serve_chats",
    "summary",
]
