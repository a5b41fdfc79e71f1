"""Classify pictures over HTTP with a file of `fullstride export`. The server is uvicorn.

pip install fullstride starlette uvicorn
MODEL=model.onnx uvicorn --app-dir docs/guides serve:app --limit-concurrency 300
curl --data-binary @picture.jpg localhost:8000

Pictures that have arrived wait for their turn; slow uploads keep nobody waiting. Within the limits
below, and uvicorn's of connections, a worker needs less than 1 GiB beside the network.

Answers: 400 no picture, 408 too slow, 413 too large, 503 busy: try again.
"""

import asyncio
import os
from contextlib import AsyncExitStack

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fullstride.data.readers.decode import OversizedImage, UnreadableImage
from fullstride.deploy.formats import open_file
from fullstride.deploy.predict import probabilities, read_view

UPLOAD_S = 30  # in which a picture has to arrive
WAIT_S = 30  # in which its turn has to come
MAX_WAITING = 200  # pictures that have arrived and wait for their turn
MAX_BYTES = 20 * 2**20  # of a picture
LARGE_BYTES = 2**20  # from which on an upload counts as large
MAX_LARGE_UPLOADS = 12  # large pictures whose bytes are held at a time
MAX_MIB = 192  # to decode a picture, by its header: 24 megapixels of RGBA, 64 of most JPEGs
SMALL_MIB = 16  # such pictures do not wait for larger ones
model = open_file(os.environ["MODEL"], threads=1)  # per worker: uvicorn --workers N
# How many pictures are decoded and computed at a time, and how many bodies are large.
small, large, large_uploads = map(asyncio.Semaphore, (2, 1, MAX_LARGE_UPLOADS))
waiting = 0


class Busy(Exception):  # noqa: N818
    """A picture that cannot be taken now, and why."""


async def classify(request: Request) -> Response:
    try:
        async with AsyncExitStack() as held:
            async with asyncio.timeout(UPLOAD_S):
                body = await _body(request, held)
            return JSONResponse(await _answer(body))
    except ClientDisconnect:
        return Response(status_code=400)  # nobody reads it
    except TimeoutError:
        return _error(408, f"the picture took more than {UPLOAD_S} s to arrive")
    except OversizedImage as error:
        return _error(413, error.reason)
    except UnreadableImage as error:
        return _error(400, error.reason)
    except Busy as busy:
        return _error(503, str(busy), {"Retry-After": "1"})


async def _body(request: Request, held: AsyncExitStack) -> bytes:
    """The picture; a large one is counted among the large uploads until `held` is closed."""
    body = bytearray()
    async for chunk in request.stream():
        if len(body) <= LARGE_BYTES < len(body) + len(chunk):
            if large_uploads.locked():
                raise Busy("too many large pictures at a time")
            await held.enter_async_context(large_uploads)
        body += chunk
        if len(body) > MAX_BYTES:
            raise OversizedImage("picture", f"it has more than {MAX_BYTES >> 20} MiB")
    return bytes(body)


async def _answer(body: bytes) -> dict[str, float]:
    try:
        return await _in_turn(small, body, SMALL_MIB)
    except OversizedImage:
        return await _in_turn(large, body, MAX_MIB)


async def _in_turn(turns: asyncio.Semaphore, body: bytes, max_mib: float) -> dict[str, float]:
    global waiting
    if waiting >= MAX_WAITING:
        raise Busy("too many pictures at a time")
    waiting += 1
    try:
        async with asyncio.timeout(WAIT_S):
            await turns.acquire()
    except TimeoutError:
        raise Busy(f"the picture waited for {WAIT_S} s") from None
    finally:
        waiting -= 1
    try:
        return await asyncio.to_thread(_scores, body, max_mib)
    finally:
        turns.release()


def _scores(body: bytes, max_mib: float) -> dict[str, float]:
    (row,) = probabilities(model, [read_view(body, model, max_mib)])
    return {name: round(float(value), 4) for name, value in zip(model.classes, row, strict=True)}


def _error(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": reason}, status, headers)


app = Starlette(routes=[Route("/", classify, methods=["POST"])])
