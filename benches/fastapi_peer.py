"""The statistics route as one would write it with FastAPI: the last reading is kept, and sent when asked for.

/dict leaves it to the framework to turn it into JSON, as most servers do; /bytes sends the JSON kept from before.
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
