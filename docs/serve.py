"""Classify pictures over HTTP with a file of `fullstride export`. The server is uvicorn.

pip install fullstride starlette uvicorn
MODEL=model.onnx uvicorn --app-dir docs serve:app
curl --data-binary @picture.jpg localhost:8000

Answers: 400 no picture, 408 too slow, 413 too large, 503 busy: try again.
"""

import os

from anyio import CapacityLimiter, fail_after, to_thread
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fullstride.data.readers.decode import OversizedImage, UnreadableImage
from fullstride.deploy.formats import open_file
from fullstride.deploy.predict import probabilities, read_view

MAX_BYTES = 20 * 2**20  # of a picture
MAX_MIB = 192  # to decode a picture, by its header: 24 megapixels of RGBA, 64 of most JPEGs
SMALL_MIB = 16  # such pictures do not wait for larger ones
MAX_REQUESTS = 16  # at a time; each holds a picture's bytes
UPLOAD_S = 30
model = open_file(os.environ["MODEL"], threads=1)  # per worker: uvicorn --workers N
small, large = CapacityLimiter(2), CapacityLimiter(1)  # threads
requests = 0


async def classify(request: Request) -> Response:
    global requests
    if requests >= MAX_REQUESTS:
        return _error(503, "too many pictures at a time", {"Retry-After": "1"})
    requests += 1
    try:
        with fail_after(UPLOAD_S):
            body = await _body(request)
        return await _answer(body)
    except ClientDisconnect:
        return Response(status_code=400)  # nobody reads it
    except TimeoutError:
        return _error(408, f"the picture took more than {UPLOAD_S} s to arrive")
    except OversizedImage as error:
        return _error(413, error.reason)
    except UnreadableImage as error:
        return _error(400, error.reason)
    finally:
        requests -= 1


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise OversizedImage("picture", f"it has more than {MAX_BYTES >> 20} MiB")
    return bytes(body)


async def _answer(body: bytes) -> Response:
    try:
        scores = await to_thread.run_sync(_scores, body, SMALL_MIB, limiter=small)
    except OversizedImage:
        scores = await to_thread.run_sync(_scores, body, MAX_MIB, limiter=large)
    return JSONResponse(scores)


def _scores(body: bytes, max_mib: float) -> dict[str, float]:
    (row,) = probabilities(model, [read_view(body, model, max_mib)])
    return {name: round(float(value), 4) for name, value in zip(model.classes, row, strict=True)}


def _error(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": reason}, status, headers)


app = Starlette(routes=[Route("/", classify, methods=["POST"])])
