# SPDX-License-Identifier: Apache-2.0
"""A proxy for two vLLM servers with `KVCacheConnector`: one server prefills, and the other decodes.

    python examples/vllm_proxy.py --port 8000 --prefill http://localhost:8100 --decode http://localhost:8200

Needs only aiohttp, which vLLM installs. If the prefill server fails, the decode server computes the
prompt. If the decode server fails, the client gets status 502 with the reason.
"""

import argparse
import json

from aiohttp import ClientError, ClientSession, ClientTimeout, web

PREFILL_TIMEOUT_S = 60  # seconds; after this time, the decode server computes the prompt
NOT_FOR_PREFILL = ("stream", "stream_options", "n", "min_tokens", "max_completion_tokens")
SERVERS = web.AppKey("servers", argparse.Namespace)
SESSION = web.AppKey("session", ClientSession)


async def prefill(session: ClientSession, url: str, body: dict, headers: dict) -> dict | None:
    """Compute the prompt. Return the location of its blocks, or None if the server fails."""
    prompt = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL}
    prompt |= {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    options = {"json": prompt, "headers": headers, "timeout": ClientTimeout(PREFILL_TIMEOUT_S)}
    try:
        async with session.post(url, **options) as answer:
            answer.raise_for_status()
            return (await answer.json())["kv_transfer_params"]
    except (ClientError, OSError) as error:  # TimeoutError is an OSError
        print(f"{url}: {error!r}; the decode server computes the prompt", flush=True)
        return None


async def complete(request: web.Request) -> web.StreamResponse:
    """Send a request to the prefill server and then to the decode server. Stream the answer."""
    session, servers = request.app[SESSION], request.app[SERVERS]
    body, response = await request.json(), web.StreamResponse()
    headers = {k: v for k, v in request.headers.items() if k in ("Authorization", "X-Request-Id")}
    # Only the proxy sets kv_transfer_params: the decode server connects to the addresses in them.
    body["kv_transfer_params"] = await prefill(
        session, servers.prefill + request.path, body, headers
    )
    try:
        async with session.post(
            servers.decode + request.path, json=body, headers=headers
        ) as answer:
            response.set_status(answer.status)
            response.content_type = answer.content_type
            async for chunk in answer.content.iter_any():
                if not response.prepared:
                    await response.prepare(request)
                await response.write(chunk)
    except ClientError as error:
        text = f"the decode server {servers.decode} failed: {error!r}"
        failure = {"error": {"message": text, "type": "bad_gateway", "code": 502}}
        if not response.prepared:
            return web.json_response(failure, status=502)
        await response.write(f"data: {json.dumps(failure)}\n\n".encode())  # within a stream
    return response


async def with_session(app: web.Application):
    """Keep one session for the application's lifetime."""
    async with ClientSession(timeout=ClientTimeout(total=None)) as app[SESSION]:
        yield


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    app = web.Application(client_max_size=1 << 30)
    app[SERVERS] = parser.parse_args()
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/v1/chat/completions", complete)
    app.cleanup_ctx.append(with_session)
    web.run_app(app, host="127.0.0.1", port=app[SERVERS].port, handler_cancellation=True)
