"""Routes of a vLLM server for `attnmech engine`; loaded only with VLLM_PLUGINS=attnmech.

They lie below /v1/, which the server's --api-key protects.
"""

import json
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response

from ..file import joined_ranks, to_bytes

PATH = "/v1/attnmech"


class Endpoints:
    """An endpoint plugin: POST start, take, stop and scale."""

    name = "attnmech"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        @app.post(PATH + "/start")
        async def start(request: Request) -> None:
            tokenizer = self._client.get_tokenizer() if not self._client.model_config.skip_tokenizer_init else None
            special = [] if tokenizer is None else tokenizer.all_special_ids
            await self._call("attnmech_start", json.dumps({**await _json(request), "special": special}))

        @app.post(PATH + "/take")
        async def take() -> Response:
            files = await self._call("attnmech_take")
            return Response(to_bytes(*joined_ranks(files)), media_type="application/octet-stream")

        @app.post(PATH + "/stop")
        async def stop() -> None:
            await self._call("attnmech_stop")

        @app.post(PATH + "/scale")
        async def scale(request: Request) -> None:
            await self._call("attnmech_scale", json.dumps((await _json(request)).get("factors", [])))
            await self._client.reset_prefix_cache()

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keeps the server's engine."""
        self._client = engine_client

    async def _call(self, method: str, *arguments: str) -> Any:
        try:
            return await self._client.collective_rpc(method, args=arguments)
        except Exception as error:  # of the worker's process, as text
            raise HTTPException(409, str(error)) from error


async def _json(request: Request) -> dict[str, Any]:
    body = await request.body()
    try:
        options = json.loads(body or b"{}")
    except ValueError as error:
        raise HTTPException(400, f"the body must be JSON: {error}") from error
    if not isinstance(options, dict):
        raise HTTPException(400, "the body must be a JSON object.")
    return options
