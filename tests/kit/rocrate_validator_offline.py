"""Runs roc-validator where there is no network: the RO-Crate context, and nothing else, comes from a file.

    python rocrate_validator_offline.py CONTEXT ARGUMENT...

The file is the one that the library `rocrate` ships, of a later version, which knows all terms of 1.1.
"""

import email.message
import io
import sys
import urllib.error
import urllib.request

import rdflib._networking
import rdflib.parser
import requests
import urllib3

with open(sys.argv[1], "rb") as file:
    CONTEXT = file.read()


class Answer(io.BytesIO):
    status = 200

    def __init__(self, url):
        super().__init__(CONTEXT)
        self.url = url
        self.headers = email.message.Message()
        self.headers["Content-Type"] = "application/ld+json"

    def geturl(self):
        return self.url

    def info(self):
        return self.headers

    def getcode(self):
        return self.status


def is_context(url):
    return url.startswith("https://w3id.org/ro/crate/") and url.endswith("/context")


def urlopen(request, *_, **__):
    url = request if isinstance(request, str) else request.full_url
    if not is_context(url):
        raise urllib.error.URLError(f"{url} is not asked in a test")
    return Answer(url)


def send(self, request, **_):
    if not is_context(request.url):
        raise requests.ConnectionError(f"{request.url} is not asked in a test")
    headers = {"Content-Type": "application/ld+json"}
    raw = urllib3.HTTPResponse(
        io.BytesIO(CONTEXT), headers, 200, preload_content=False, request_url=request.url, reason="OK"
    )
    return self.build_response(request, raw)


urllib.request.urlopen = urlopen
for module in (rdflib._networking, rdflib.parser):
    for name in ("urlopen", "_urlopen"):
        if hasattr(module, name):
            setattr(module, name, urlopen)
requests.adapters.HTTPAdapter.send = send

from rocrate_validator.cli import cli  # noqa: E402

sys.argv = ["rocrate-validator", *sys.argv[2:]]
cli()
