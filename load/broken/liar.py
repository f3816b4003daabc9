"""A proxy that replaces the gateway's Retry-After with 1.

Arguments: the gateway's address, and a file for the proxy's own address.
"""

import http.client
import http.server
import sys

GATEWAY, FILE = sys.argv[1:]


class Liar(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        gateway = http.client.HTTPConnection(GATEWAY, timeout=10)
        gateway.request("GET", self.path, headers={"x-api-key": self.headers.get("x-api-key", "")})
        answer = gateway.getresponse()
        body = answer.read()
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            self.send_header(name, "1" if name.lower() == "retry-after" else value)
        self.end_headers()
        self.wfile.write(body)
        gateway.close()

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar)
with open(FILE, "w") as file:
    file.write("127.0.0.1:%d" % server.server_port)
server.serve_forever()
