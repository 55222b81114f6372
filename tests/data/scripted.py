"""A server that answers as a test tells it to, and remembers what it was asked."""

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from blockdraft.data import Conversation, GenerationSettings, Prompt, ServerEngine

WORDS = [7, 8, 9]
TEXT = "w7 w8 w9"


class Scripted:
    """`answer(body, number)` gives the reply to the number-th completion: a dict, or (status, body, headers)."""

    def __init__(self, answer, *, models=("tiny",), hold=0.0):
        self.answer, self.models, self.hold = answer, list(models), hold
        self.requests, self.paths, self.headers = [], [], []
        self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply(200, {"data": [{"id": name} for name in script.models]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with script.lock:
                    number = len(script.requests)
                    script.requests.append(body)
                    script.paths.append(self.path)
                    script.headers.append(dict(self.headers))
                    script.under_way += 1
                    script.most_under_way = max(script.most_under_way, script.under_way)
                time.sleep(script.hold)
                answer = script.answer(body, number)
                with script.lock:
                    script.under_way -= 1
                if answer is None:  # hang up without a word
                    self.connection.close()
                    return
                self.reply(*(answer if isinstance(answer, tuple) else (200, answer)))

            def reply(self, status, body, headers=None):
                raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                with contextlib.suppress(OSError):  # the client may have left
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(raw)))
                    for name, value in (headers or {}).items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(raw)

            def log_message(self, *_):
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_):
                pass

        self.httpd = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.httpd.server_port}/v1"
        self.thread = threading.Thread(target=self.httpd.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def asked(self):
        """Requests after the probe."""
        return self.requests[1:]

    def stop(self):
        self.httpd.shutdown()
        self.httpd.server_close()
        self.thread.join()


def completion(body, token_ids=None, *, text="", finish="stop", count=None, **more):
    """A reply to a request whose prompt is token ids or words."""
    prompt = body.get("prompt", [])
    read = len(prompt.split() if isinstance(prompt, str) else prompt)
    choice = {"index": 0, "text": text, "finish_reason": finish} | more
    if token_ids is not None:
        choice["token_ids"] = token_ids
    usage = {"prompt_tokens": read}
    if count is not None:
        usage["completion_tokens"] = count
    return {"choices": [choice], "usage": usage}


def after_probe(answer):
    """A server that takes the first request, which asks how it wants to be asked."""
    return lambda body, number: answer(body, number) if number else completion(body, [7], finish="length")


def engine_for(target, *servers, settings=None, **options):
    """An engine that has spoken to its servers."""
    options = {"pause": 0.01, "retries": 3, "timeout": 20, "concurrency": 4, "notify": lambda _: None} | options
    engine = ServerEngine([getattr(server, "url", server) for server in servers], **options)
    engine.prepare(target, (settings or GenerationSettings()).sampling)
    return engine


def conversations(target, count, turns=("w10 w11",), settings=None):
    settings = settings or GenerationSettings()
    return [Conversation(Prompt(f"p{i}", turns), target, settings, index=i) for i in range(count)]


def answered(target, *servers, count=1, turns=("w10 w11",), settings=None, **options):
    """So many conversations of these turns, done."""
    engine = engine_for(target, *servers, settings=settings, **options)
    return list(engine.run(conversations(target, count, turns, settings)))


def only(done):
    (conversation,) = done
    return conversation
