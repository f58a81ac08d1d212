"""A stand-in for a service: answers /healthz after a while, and stops well or badly.

python dummy_service.py PORT [slow-start SECONDS | never-ready | exit STATUS | ignore-term | grandchild | leak-shm]
"""

import http.server
import os
import signal
import subprocess
import sys
import threading
import time


def main() -> None:
    port, mode, argument = int(sys.argv[1]), *[*sys.argv[2:], "", ""][:2]
    print(f"dummy {mode or 'plain'} on {port}", flush=True)
    if mode == "exit":
        print("cannot go on", flush=True)
        sys.exit(int(argument))
    if mode == "slow-start":
        time.sleep(float(argument))
    if mode == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "grandchild":
        # Leaves the group, so that killing the group does not reach it.
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    ready = mode != "never-ready"

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if ready and self.path == "/healthz" else 503)
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    if mode != "ignore-term":
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    if mode == "leak-shm":
        import mmap

        path = f"/dev/shm/kv-dummy-{os.getpid()}"
        with open(path, "w+b") as stream:
            stream.truncate(4096)
            area = mmap.mmap(stream.fileno(), 4096)
        area[0] = 1
    server.serve_forever(poll_interval=0.05)
    print("dummy stopped", flush=True)


if __name__ == "__main__":
    main()
