# SPDX-License-Identifier: Apache-2.0
"""Sends random HTTP requests: modified bodies, raw bytes, broken HTTP, and clients that disconnect.

No request may crash or hang the server, or result in a status of 500 or above. An error about a
modified field must name the field. Correct requests sent in between must get correct answers, and
at the end no block may be held.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from tests.machinery.http.process import (
    Reply,
    ServeProcess,
    ask,
    connect,
    reply_of,
    request_of,
    text_of,
)

SECONDS = 30  # time limit for any request
OPTIONS = ["--max-model-len=256", "--max-num-seqs=8", "--request-timeout=3", "--grace=1"]
HONEST = {"model": "llama", "prompt": "An honest prompt.", "max_tokens": 8, "temperature": 0}
PATHS = ("/v1/completions", "/v1/chat/completions")
HUGE = "9" * 5_000  # more digits than Python converts to an int by default

WRONG: list[object] = [
    *(None, True, False, 0, -1, 1, 2, 2**31 - 1, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**400),
    *(0.5, -0.5, 1e308, 5e-324, 1e-320, float("nan"), float("inf"), -float("inf")),
    *("", "a", "\0", "\ud800", "a\udfffb", "\uffff", "é€😀", "x" * 300, "x" * 10_000, "null", "[1]"),
    *([], [[]], {}, [{}], [None], [1, 2], [1.5], ["a"], ["a", 1], [[1], [2]], [[1], "a"], [-1]),
    *([2**40], [512], [True], [[[1]]], {"a": 1}, {"type": "text", "text": "a"}, ["z" * 200] * 20),
    *([[1]] * 200, ["a"] * 40, [1] * 300),
]  # fmt: skip


class Case(NamedTuple):
    """A request to send in pieces, and the expected outcome."""

    kind: str
    pieces: list[bytes]
    is_whole: bool = False  # a well-formed HTTP request, which must get a reply
    field: str | None = None  # name of the modified field
    pause: float = 0.0  # seconds between pieces
    leaves: bool = False  # the client closes without reading


def body_of(rng: random.Random, path: str) -> dict:
    """Return a valid body."""
    body = {"model": "llama", "max_tokens": rng.randint(1, 4)}
    if path == PATHS[0]:
        prompts = ["hello", [1, 2, 3], ["a", "b"], [[1], [2, 3]], "x" * 100]
        body["prompt"] = rng.choice(prompts)
    else:
        content = rng.choice(["Who?", [{"type": "text", "text": "Who?"}]])
        body["messages"] = [{"role": rng.choice(["system", "user"]), "content": content}] * 2
    options = {
        **{"temperature": rng.choice([0, 0.7, 5e-324]), "top_p": 0.9, "top_k": 5, "n": 2,
            "seed": 7},
        **{"stop": rng.choice(["z", ["ab", "cd"]]), "stream": True, "user": "me", "echo": False},
        **{"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        **{"logprobs": 3 if path == PATHS[0] else True, "repetition_penalty": 1.5},
        **{"ignore_eos": True, "stop_token_ids": [5], "metadata": {"a": "b"}},
        **{"response_format": {"type": "text"}},
    }  # fmt: skip
    for name in rng.sample([*options], rng.randint(0, 4)):
        body[name] = options[name]
    if "stream" not in body:
        body.pop("stream_options", None)
    return body


def _changed(rng: random.Random, body: dict) -> tuple[bytes, str | None]:
    """Return a body with one error, and the name of the invalid field if there is one."""
    others = ("cache_salt", "priority", "top_logprobs", "tools", "tool_choice", "stop")
    names = [*body, *others, "\ud800", "x" * 300]
    name, kind = rng.choice(names), rng.random()
    if kind < 0.6:
        value = rng.choice(WRONG)
        return json.dumps(body | {name: value}).encode(), name
    if kind < 0.7:
        text = json.dumps(body | {name: "HERE"})
        return text.replace(
            '"HERE"', rng.choice([HUGE, "-" + HUGE, "[" + HUGE + "]"])
        ).encode(), name
    if kind < 0.75 and name in body:
        return json.dumps({k: v for k, v in body.items() if k != name}).encode(), None
    data = bytearray(json.dumps(body).encode())
    if kind < 0.85:
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind < 0.9:
        del data[rng.randrange(len(data)) :]
    elif kind < 0.95:
        at = rng.randrange(len(data))
        data[at:at] = data[: rng.randrange(len(data))]
    else:
        data = bytearray(rng.choice([json.dumps(body).encode("utf-16"), b"\xef\xbb\xbf" + data]))
    return bytes(data), None


def _raw(rng: random.Random) -> bytes:
    deep = rng.choice([5, 100, 900, 5_000])
    return rng.choice(
        [
            *(b"", b"null", b"[]", b'"a"', b"{", b"\xff\xfe", b"NaN", HUGE.encode(), b"{}" * 50),
            *(b"[" * deep, b"[" * deep + b"]" * deep, b'{"prompt":' * deep + b"1" + b"}" * deep),
            *(rng.randbytes(rng.randint(1, 500)), b"a" * 100_000),
            b'{"prompt":"' + b"a" * 300_000 + b'"}',
            b'{"model":"llama","prompt":[' + b"1," * 30_000 + b"1]}",
        ]
    )  # fmt: skip


def _broken(rng: random.Random) -> bytes:
    body = json.dumps(HONEST).encode()
    whole = request_of("POST", PATHS[0], body)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    length = b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
    chunked = b"Transfer-Encoding: chunked\r\n\r\n"
    kinds = [
        lambda: rng.randbytes(rng.randint(1, 300)),
        lambda: whole.replace(b"HTTP/1.1", rng.choice([b"HTTP/9.9", b"HTTP/1.0", b"", b"\0"])),
        lambda: whole.replace(b"POST", rng.choice([b"GET", b"BREW", b"", b"P\0ST", b"p" * 9_000])),
        lambda: whole.replace(b"/v1/completions", rng.choice([b"*", b"/%00", b"/\xff", b"/" * 20_000])),
        lambda: head + b"Content-Length: " + rng.choice([b"-1", b"x", b"9" * 30, b"1, 2"]) + b"\r\n\r\n",
        lambda: head + chunked + rng.choice([b"zz\r\n", b"ffffffff\r\n", b"5\r\na"]),
        lambda: head + b"Transfer-Encoding: gzip\r\n\r\n" + body,
        lambda: head + b"X: " + b"y" * rng.choice([100, 70_000]) + b"\r\n\r\n",
        lambda: head + b"".join(b"X%d: y\r\n" % i for i in range(3_000)) + b"\r\n",
        lambda: head + b"Expect: 100-continue\r\n" + length + body,
        lambda: head + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        lambda: head + b" folded\r\nContent-Length: 0\r\n\r\n",
        lambda: whole.replace(b"\r\n", b"\n"),
        lambda: whole.replace(b"Connection: close\r\n", b"") * 2 + whole,
    ]  # fmt: skip
    data = bytearray(rng.choice(kinds)())
    if data and rng.random() < 0.2:
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def case_of(rng: random.Random) -> Case:
    """Return a random case of any kind."""
    path, draw = rng.choice(PATHS), rng.random()
    body = body_of(rng, path)
    if draw < 0.1:
        return Case("right", [request_of("POST", path, body)], True)
    if draw < 0.65:
        data, field = _changed(rng, body)
        return Case("changed", [request_of("POST", path, data)], True, field)
    if draw < 0.75:
        return Case("raw", [request_of(rng.choice(["POST", "PUT", "GET"]), path, _raw(rng))], True)
    if draw < 0.88:
        return Case("broken", [_broken(rng)])
    whole = request_of("POST", path, body | {"stream": True, "max_tokens": 60})
    if draw < 0.9:
        most = body | {"max_tokens": 8} | rng.choice([
            {"n": 8, "temperature": 1.0},
            {"stop": ["z" * 127 + chr(97 + i) for i in range(16)]},
            *([{"prompt": [[i, 1] for i in range(16)]}] if "prompt" in body else []),
        ])  # fmt: skip
        return Case("large", [request_of("POST", path, most)])
    if draw < 0.91:
        return Case(
            "silent", [rng.choice([b"", b"POST", b"GET / HTTP/1.1\r\n"])], leaves=True, pause=3
        )
    if draw < 0.93:
        cut = rng.randrange(len(whole))
        return Case("cut", [whole[:cut]], leaves=rng.random() < 0.8)
    if draw < 0.96:
        size = rng.randint(20, 100)
        pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
        return Case("in pieces", pieces, True, pause=0.01)
    return Case("goes away", [whole], leaves=True, pause=rng.choice([0, 0.02, 1]))


def send(port: int, case: Case) -> Reply | None:
    """Send a case.

    Return the reply, or None if the client disconnected first. Raises TimeoutError if no reply
    arrives.
    """
    try:
        with connect(port, SECONDS) as connection:
            for piece in case.pieces:
                connection.sendall(piece)
                time.sleep(case.pause)
            if case.leaves:
                return None
            return reply_of(connection, SECONDS)
    except ConnectionError:
        return Reply(0, b"")


def fault_of(case: Case, reply: Reply | None) -> str | None:
    """Describe the first error in a reply, if any."""
    if reply is None:
        return None
    if reply.status == 0:
        return "no reply" if case.is_whole and len(case.pieces[0]) < 200_000 else None
    if reply.status >= 500:
        return f"status {reply.status}"
    if case.kind == "right" and reply.status != 200:
        return f"status {reply.status} for a valid request"
    if reply.status == 200 and case.is_whole and b'"error"' in reply.body:
        return "an error in a response with status 200"
    if reply.status in (400, 413, 429) and case.is_whole:
        message = json.loads(reply.body)["error"]["message"]
        if not message:
            return "an error without a message"
        if len(message) > 1_000:
            return "an error longer than 1,000 characters"
    return None


def is_named(case: Case, reply: Reply | None) -> bool:
    """Whether an error response about one modified field names the field."""
    if case.field is None or reply is None or reply.status not in (400, 404):
        return True
    message = json.loads(reply.body)["error"]["message"]
    if case.field == "\ud800":
        return "\\ud800" in message
    words = {"max_tokens": ("max_tokens", "tokens"), "\ud800": ("a name in the body",)}
    return any(word in message for word in words.get(case.field, (case.field[:100],)))


def run(server: ServeProcess, seed: int, count: int, num_clients: int = 8) -> Counter[str]:
    """Send random requests.

    Return the number of requests by kind and status. Raises AssertionError at the first fault.
    """
    wanted = text_of(ask(server.port, "POST", PATHS[0], HONEST))
    assert wanted is not None
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(num_clients) as pool:
        parts = [range(i, count, num_clients) for i in range(num_clients)]
        for part in pool.map(lambda part: _sent(server, seed, part, wanted), parts):
            counts += part
    server.wait_until_empty()
    return counts


def _sent(server: ServeProcess, seed: int, numbers: range, wanted: str) -> Counter[str]:
    """Send one client's requests."""
    counts: Counter[str] = Counter()
    for turn, i in enumerate(numbers):
        case = case_of(random.Random(f"{seed} {i}"))
        where = f"seed {seed}, request {i} ({case.kind}): "
        try:
            reply = send(server.port, case)
        except TimeoutError:
            raise AssertionError(
                f"{where}no end after {SECONDS} s: {case.pieces[0][:500]}"
            ) from None
        fault = fault_of(case, reply)
        assert fault is None, f"{where}{fault}: {case.pieces[0][:500]} -> {reply}"
        status = "left" if reply is None else "closed" if reply.status == 0 else str(reply.status)
        counts[f"{case.kind}: {status}"] += 1
        if not is_named(case, reply):
            counts["unnamed"] += 1
            print(f"{where}{case.field[:50]!r} is not named: {reply.body[:300]}", flush=True)
        if turn % 4 == 3:
            assert server.is_running, f"{where}the server has ended"
            found = text_of(ask(server.port, "POST", PATHS[0], HONEST, SECONDS))
            assert found == wanted, f"{where}an honest client got {found!r}, not {wanted!r}"
    return counts
