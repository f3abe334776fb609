# SPDX-License-Identifier: Apache-2.0
"""A proxy for two servers that exchange KV through kvcache: one prefills, and the other decodes.

    python examples/prefill_decode_proxy.py --port 8000 --prefill http://localhost:8100 \\
        --decode sglang:http://localhost:30000

A server is vLLM with `KVCacheConnector` or, with the prefix `sglang:`, SGLang with KVCACHE_EXCHANGE. The
proxy needs only aiohttp, which both engines install. If the prefill server fails, the decode server
computes the prompt. If the decode server fails, the client receives status 502 and the reason.
"""

import argparse
import json

from aiohttp import ClientError, ClientSession, ClientTimeout, web

PREFILL_TIMEOUT_S = 60  # after this timeout, the decode server computes the prompt
NOT_FOR_PREFILL = ("stream", "stream_options", "n", "min_tokens", "max_completion_tokens")
SERVERS = web.AppKey("servers", argparse.Namespace)
SESSION = web.AppKey("session", ClientSession)


def server(text: str) -> tuple[str, bool]:
    """Return the URL of a server, and whether it is SGLang."""
    url = text.removeprefix("sglang:")
    return url.rstrip("/"), url != text


def prefill_request(path: str, body: dict, is_sglang: bool) -> tuple[str, dict] | None:
    """Return the path and body of the request that computes a prompt, or None if it is not supported."""
    if is_sglang:
        prompt = body.get("prompt")
        is_one = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
        if path != "/v1/completions" or not is_one:
            return None  # SGLang returns offers only from /generate, which has no chat templates
        sampling = {"max_new_tokens": 1, "custom_params": {"kvcache": "offer"}}
        name = "text" if isinstance(prompt, str) else "input_ids"
        request = {name: prompt, "sampling_params": sampling}
        return "/generate", request | {"cache_salt": body.get("cache_salt")}
    prompt = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL}
    return path, prompt | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


def offer_in(answer: dict, is_sglang: bool) -> dict | None:
    """Return the offer in a prefill server's response."""
    if is_sglang:
        found = [each for each in answer["meta_info"].get("kvcache") or () if each is not None]
        return json.loads(found[-1]) if found else None
    return (answer["kv_transfer_params"] or {}).get("kvcache")


async def prefill(session: ClientSession, servers: argparse.Namespace, path, body, headers):
    """Compute the prompt on the prefill server. Return the offer of its blocks, if there is one."""
    url, is_sglang = servers.prefill
    if (request := prefill_request(path, body, is_sglang)) is None:
        return None
    options = {"json": request[1], "headers": headers, "timeout": ClientTimeout(PREFILL_TIMEOUT_S)}
    try:
        async with session.post(url + request[0], **options) as answer:
            answer.raise_for_status()
            return offer_in(await answer.json(), is_sglang)
    except (ClientError, OSError, LookupError, TypeError, ValueError) as error:
        print(f"{url}: {error!r}; the decode server computes the prompt", flush=True)
        return None


def with_offer(body: dict, offer: dict | None, is_sglang: bool) -> dict:
    """Return the request to the decode server.

    Offers from clients are removed, because the decode server connects to the addresses in an offer.
    """
    custom = dict(body.get("custom_params") or {})
    custom.pop("kvcache", None)
    body = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    if is_sglang:
        if offer is not None:
            custom["kvcache"] = json.dumps(offer)
        return body | ({"custom_params": custom} if custom else {})
    if offer is None:
        return body
    return body | {"kv_transfer_params": {"do_remote_prefill": True, "kvcache": offer}}


async def complete(request: web.Request) -> web.StreamResponse:
    """Send a request to the prefill server and then to the decode server, and stream the answer."""
    session, servers = request.app[SESSION], request.app[SERVERS]
    body, response = await request.json(), web.StreamResponse()
    headers = {k: v for k, v in request.headers.items() if k in ("Authorization", "X-Request-Id")}
    offer = await prefill(session, servers, request.path, body, headers)
    url, is_sglang = servers.decode
    body = with_offer(body, offer, is_sglang)
    try:
        async with session.post(url + request.path, json=body, headers=headers) as answer:
            response.set_status(answer.status)
            response.content_type = answer.content_type
            async for chunk in answer.content.iter_any():
                if not response.prepared:
                    await response.prepare(request)
                await response.write(chunk)
    except ClientError as error:
        text = f"the decode server {url} failed: {error!r}"
        failure = {"error": {"message": text, "type": "bad_gateway", "code": 502}}
        if not response.prepared:
            return web.json_response(failure, status=502)
        # The status was already sent, so the error is sent as the last event of the stream.
        await response.write(f"data: {json.dumps(failure)}\n\n".encode())
    return response


async def with_session(app: web.Application):
    """Keep one HTTP session open for the application's lifetime."""
    async with ClientSession(timeout=ClientTimeout(total=None)) as app[SESSION]:
        yield


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", type=server, required=True, metavar="[sglang:]URL")
    parser.add_argument("--decode", type=server, required=True, metavar="[sglang:]URL")
    app = web.Application(client_max_size=1 << 30)
    app[SERVERS] = parser.parse_args()
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/v1/chat/completions", complete)
    app.cleanup_ctx.append(with_session)
    web.run_app(app, host="127.0.0.1", port=app[SERVERS].port, handler_cancellation=True)
