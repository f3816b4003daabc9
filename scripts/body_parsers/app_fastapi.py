"""Every way in which FastAPI and Starlette applications read a field: started by scripts/body-parsers."""
import json
import sys

import uvicorn
from fastapi import FastAPI, Request

app = FastAPI()


@app.api_route("/{_}/{field}", methods=["GET", "POST", "PUT"])
async def login(_: str, field: str, request: Request):
    outer, _, inner = field.partition(".")
    raw = await request.body()
    read = {}
    try:
        found = json.loads(raw)
        nested = found.get(outer)
        read["request.json"] = [found.get(field), nested.get(inner) if isinstance(nested, dict) else None]
    except Exception:
        read["request.json"] = None
    try:
        async with request.form() as form:
            read["request.form"] = [str(value) for value in form.getlist(field) + form.getlist(f"{outer}[{inner}]") if isinstance(value, str)]
    except Exception:
        read["request.form"] = None
    return read


uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
