"""Peer for the statistics route, written with FastAPI: it serves the last reading from memory.

The framework encodes the JSON of /dict, as in most servers; /bytes sends JSON that was encoded before.
"""

import json
import os

from fastapi import FastAPI, Response

with open(os.environ["BODY"], "rb") as file:
    BYTES = file.read()
DICT = json.loads(BYTES)
app = FastAPI()


@app.get("/dict")
async def as_dict():
    return DICT


@app.get("/bytes")
async def as_bytes():
    return Response(BYTES, media_type="application/json")
