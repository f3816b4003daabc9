"""Every way in which Flask applications read a field: started by scripts/body-parsers."""
import json
import sys

from flask import Flask, jsonify, request

app = Flask(__name__)


@app.route("/<_>/<field>", methods=["GET", "POST", "PUT"])
def login(_, field):
    outer, _, inner = field.partition(".")
    raw = request.get_data(cache=True)

    def inside(found):
        if not isinstance(found, dict):
            return None
        nested = found.get(outer)
        return [found.get(field), nested.get(inner) if isinstance(nested, dict) else None]

    def loads(text):
        try:
            return inside(json.loads(text))
        except (ValueError, RecursionError):
            return None

    return jsonify({
        "request.form": request.form.getlist(field) + request.form.getlist(f"{outer}[{inner}]"),
        "request.values": request.values.getlist(field),
        "get_json": inside(request.get_json(silent=True)),
        "get_json(force)": inside(request.get_json(force=True, silent=True)),
        "json.loads": loads(raw),
    })


app.run("127.0.0.1", int(sys.argv[1]), threaded=True)
