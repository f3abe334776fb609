# SPDX-License-Identifier: Apache-2.0
"""The sanitizer in a server: its reports over HTTP, in the metrics and in the log."""

import logging

import numpy as np
import pytest

pytest.importorskip("fastapi")

from kvcache_serve_tests.test_serve import HTTP, serving


def test_server_exposes_reports_over_http_and_metrics(monkeypatch, caplog):
    monkeypatch.setenv("KVCACHE_SANITIZE", "1")
    with serving() as served, caplog.at_level(logging.ERROR, "kvcache.sanitizer"):
        served.complete()
        served.wait_until_empty()
        answer = HTTP.get(f"{served.url}/kvcache/sanitizer").json()
        assert answer["mode"] == "report" and answer["reports"] == [] and answer["slots_read"]
        pages, tables = served.engine.cache.pages, served.engine.cache.tables
        # With shifted slots, some slots are never written, and uninitialized memory may contain
        # NaN.
        pages.zero(np.arange(pages.num_blocks))
        compute = tables.compute_slot_mapping

        def shifted(*args):
            compute(*args)
            tables[0].slot_mapping.np[:] -= 1

        tables.compute_slot_mapping = shifted
        served.complete(prompt="Another prompt.")
        served.wait_until_empty()
        answer = HTTP.get(f"{served.url}/kvcache/sanitizer").json()
        assert answer["counts"]["slot-mismatch"] and answer["reports"][0]["kind"] == "slot-mismatch"
        text = HTTP.get(f"{served.url}/metrics").text
        assert 'kvcache_sanitizer_reports_total{kind="slot-mismatch",model_name="llama"}' in text
        assert "==kvcache sanitizer== slot-mismatch" in caplog.text


def test_server_without_a_sanitizer_has_no_reports():
    with serving() as served:
        answer = HTTP.get(f"{served.url}/kvcache/sanitizer").json()
        assert answer == {"mode": "off", "counts": {}, "reports": []}
        assert "kvcache_sanitizer" not in HTTP.get(f"{served.url}/metrics").text
