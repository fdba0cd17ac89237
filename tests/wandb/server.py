"""The part of wandb's server that a run without files needs."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_BUCKET = {"id": "1", "displayName": "told", "config": "{}", "historyLineCount": 0}
_ANSWERS = {
    "upsertBucket": {
        "bucket": {
            **_BUCKET,
            "name": "told",
            "project": {"id": "2", "name": "p", "entity": {"id": "3", "name": "e"}},
        },
        "inserted": True,
    },
    "createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []},
}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/file_stream"):
            self.server.streamed.append(asked)
        self._answer(
            {name: answer for name, answer in _ANSWERS.items() if name in asked.get("query", "")}
        )

    def do_GET(self):
        self._answer({})
        if self.path == "/go-away":
            threading.Thread(target=self.server.stop).start()

    def _answer(self, data):
        body = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    """Serve on a free port until a request for ``/go-away``."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        #: Content of the file stream: metrics, the summary, the exit code.
        self.streamed = []

    def stop(self):
        self.shutdown()
        self.server_close()

    @property
    def rows(self):
        lines = [
            line
            for each in self.streamed
            for line in each.get("files", {}).get("wandb-history.jsonl", {}).get("content", ())
        ]
        return [
            {k: v for k, v in json.loads(line).items() if not k.startswith("_")} for line in lines
        ]

    @property
    def exit_codes(self):
        return [each["exitcode"] for each in self.streamed if each.get("complete")]


@contextmanager
def serving():
    server = Server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()
