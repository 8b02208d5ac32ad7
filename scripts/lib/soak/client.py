"""Sends what the plan says to a server and reports what came back. Never raises for what a server may do wrong."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Sequence
from typing import Any

import httpx

from soak.judge import Outcome
from soak.plan import Kind, Request, malformed

TOP = 5  # tokens whose log-probabilities are compared
# Seconds that a connection may rest before it is used again. SGLang closes those that rest for 5; a request on its way
# at that moment would get no answer.
REST = 2.0


class Client:
    """One server. `deadline` is in seconds and for one request: nothing a soak sends may take as long."""

    def __init__(self, url: str, deadline: float, connections: int):
        limits = httpx.Limits(
            max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=REST
        )
        self._http = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(deadline), limits=limits, trust_env=False)
        self.deadline = deadline

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, request: Request, prompt: Sequence[int], rid: str) -> Outcome:
        """One planned request."""
        custom = {"tail_replay_ratio": request.ratio}
        body = _body(prompt, request.max_new, custom_params=custom) | {"rid": rid}
        if request.kind in (Kind.DISCONNECT, Kind.ABORT):
            return await self._timed(self._cut(body, request))
        if request.kind is Kind.MALFORMED:
            body = malformed(body, request.fault)
        return await self._timed(self._whole(body))

    async def cold(self, prompt: Sequence[int], max_new: int, key: str) -> Outcome:
        """The same prompt where no other request's tokens are cached. `key` must be used once only.

        Replayed in full as well: a retracted request finds its own prompt cached.
        """
        body = _body(prompt, max_new, custom_params={"tail_replay_ratio": 1.0})
        return await self._timed(self._whole(body | {"extra_key": key}))

    async def exact(self, prompt: Sequence[int], max_new: int) -> Outcome:
        """With whatever is cached, replayed in full."""
        return await self._timed(self._whole(_body(prompt, max_new, custom_params={"tail_replay_ratio": 1.0})))

    async def _timed(self, call) -> Outcome:
        begin = time.perf_counter()
        try:
            fields = await asyncio.wait_for(call, self.deadline)
        except TimeoutError:
            fields = {"status": None, "message": f"no end after {self.deadline:.0f} s"}
        except httpx.HTTPError as error:
            fields = {"status": None, "message": f"{type(error).__name__} {error}"}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            fields = {"status": None, "message": f"an answer that cannot be read: {error!r}"}
        return Outcome(seconds=time.perf_counter() - begin, **fields)

    async def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._http.post("/generate", json=body)
        if response.status_code != 200:
            return {"status": response.status_code, "message": error_message(response.text)}
        return {"status": 200, **read_answer(response.json())}

    async def _cut(self, body: dict[str, Any], request: Request) -> dict[str, Any]:
        """A stream that is left, or whose request is aborted, after some events; at once for 0 events."""
        abort = request.kind is Kind.ABORT
        sent, seen, last = asyncio.create_task(self._aborted_at_once(body["rid"], abort and not request.events)), 0, {}
        try:
            async with self._http.stream("POST", "/generate", json=body | {"stream": True}) as response:
                if response.status_code != 200:
                    await response.aread()
                    return {"status": response.status_code, "message": error_message(response.text)}
                if not abort and not request.events:
                    return {"status": 200}
                async for line in response.aiter_lines():
                    if not line.startswith("data:") or line.strip() == "data: [DONE]":
                        continue
                    last, seen = json.loads(line[5:]), seen + 1
                    if seen == request.events and not abort:
                        return {"status": 200}
                    if seen == request.events:
                        await self.abort(body["rid"])
        finally:
            await sent
        return _end_of_stream(last)

    async def _aborted_at_once(self, rid: str, wanted: bool) -> None:
        if wanted:
            await asyncio.sleep(0.02)  # or it arrives before the request, and aborts nothing
            await self.abort(rid)

    async def abort(self, rid: str) -> None:
        (await self._http.post("/abort_request", json={"rid": rid})).raise_for_status()

    async def flush(self, wait_seconds: float = 0) -> bool:
        """False: refused, because requests run."""
        response = await self._http.post(f"/flush_cache?timeout={wait_seconds}")
        if response.status_code not in (200, 400):
            response.raise_for_status()
        return response.status_code == 200

    async def healthy(self) -> bool:
        try:
            return (await self._http.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def info(self) -> dict[str, Any]:
        response = await self._http.get("/get_server_info")
        response.raise_for_status()
        return response.json()

    async def metrics(self) -> dict[str, float]:
        """Metric -> sum over its labels; empty without --enable-metrics."""
        from prometheus_client.parser import text_string_to_metric_families

        response = await self._http.get("/metrics", follow_redirects=True)
        if response.status_code != 200:
            return {}
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals


def _body(prompt: Sequence[int], max_new: int, **sampling: Any) -> dict[str, Any]:
    return {
        "input_ids": list(prompt),
        "sampling_params": {"max_new_tokens": max_new, "temperature": 0, "ignore_eos": True, **sampling},
        "return_logprob": True,
        "top_logprobs_num": TOP,
    }


def error_message(text: str) -> str:
    """What an error response says, in one line."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:500]
    except (ValueError, KeyError, TypeError):
        return text.strip()[:500]


def read_answer(reply: dict[str, Any]) -> dict[str, Any]:
    """Fields of an Outcome from a reply of /generate."""
    meta = reply["meta_info"]
    finish = meta.get("finish_reason") or {}
    chosen, top = meta.get("output_token_logprobs"), meta.get("output_top_logprobs")
    if finish.get("type") == "abort":  # in the queue: it never got as far as these
        reply, meta = {"output_ids": []} | reply, {"cached_tokens": 0} | meta
    return {
        "tokens": tuple(reply["output_ids"]),
        "cached": meta["cached_tokens"],
        "generation": (meta.get("cached_tokens_details") or {}).get("tail_replay_generation"),
        "retractions": meta.get("num_retractions") or 0,
        "finish": finish.get("type", ""),
        "message": str(finish.get("message") or ""),
        "chosen": None if chosen is None else tuple(_number(entry[0]) for entry in chosen),
        "top": None if top is None else tuple({e[1]: _number(e[0]) for e in entries or ()} for entries in top),
    }


def _number(value: float | None) -> float:
    """JSON has no NaN: SGLang writes null."""
    return math.nan if value is None else float(value)


def _end_of_stream(last: dict[str, Any]) -> dict[str, Any]:
    if "error" in last:
        error = last["error"]
        return {"status": int(error.get("code") or 400), "message": str(error.get("message"))}
    if not last:
        return {"status": None, "message": "the stream had no event"}
    return {"status": 200, **read_answer(last)}
