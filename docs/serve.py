"""Classify pictures over HTTP with a file of `fullstride export`. The server is uvicorn.

pip install 'fullstride[export]' starlette uvicorn
MODEL=model.onnx uvicorn --app-dir docs serve:app
curl --data-binary @picture.jpg localhost:8000
"""

import os

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from fullstride.data.dataset import UnreadableImage, decode
from fullstride.deploy.formats import open_file
from fullstride.deploy.predict import probabilities

MAX_BYTES = 20 * 2**20  # of a picture
model = open_file(os.environ["MODEL"], threads=1)  # per worker: uvicorn --workers N


async def classify(request: Request) -> JSONResponse:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            return JSONResponse({"error": f"the picture is larger than {MAX_BYTES >> 20} MiB"}, 413)
    try:
        picture = decode(body, model.preprocessing.channels)
    except UnreadableImage as error:
        return JSONResponse({"error": error.reason}, 400)
    (row,) = await run_in_threadpool(probabilities, model, [picture])
    return JSONResponse(
        {name: round(float(value), 4) for name, value in zip(model.classes, row, strict=True)}
    )


app = Starlette(routes=[Route("/", classify, methods=["POST"])])
