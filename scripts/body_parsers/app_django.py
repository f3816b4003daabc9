"""Every way in which Django applications read a field: started by scripts/body-parsers."""
import json
import sys
from wsgiref.simple_server import make_server

import django
from django.conf import settings
from django.core.wsgi import get_wsgi_application
from django.http import JsonResponse
from django.urls import path

APPS = ["django.contrib.contenttypes", "django.contrib.auth"]
settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"], SECRET_KEY="x", DEBUG=False, MIDDLEWARE=[], INSTALLED_APPS=APPS)
django.setup()

from django.contrib.auth.forms import UsernameField  # noqa: E402  (only once there are settings)


def login(request, _, field):
    outer, _, inner = field.partition(".")
    try:
        raw = request.body
        posted = request.POST.getlist(field) + request.POST.getlist(f"{outer}[{inner}]")
    except Exception:
        raw, posted = b"", []
    try:
        found = json.loads(raw)
        nested = found.get(outer) if isinstance(found, dict) else None
        found = [found.get(field), nested.get(inner) if isinstance(nested, dict) else None] if isinstance(found, dict) else None
    except (ValueError, RecursionError):
        found = None
    cleaned = [UsernameField(max_length=None).to_python(name) for name in posted]
    return JsonResponse({"request.POST": posted, "UsernameField": cleaned, "json.loads": found})


urlpatterns = [path("<_>/<field>", login)]
make_server("127.0.0.1", int(sys.argv[1]), get_wsgi_application()).serve_forever()
