#!/usr/bin/env python3
"""Asks `sluice serve` whatever its /openapi.json allows, and much that it does not, with schemathesis.

    scripts/schemathesis.py [--cases 10000] [--model models/demo] [--sluice target/release/sluice]

Fails where the document is not valid, where an answer has status 500 or more, or a status, a type or a schema that the document does not say, where
the server ends or panics, and where its memory has grown from the middle of the run to its end by more than an allowance. It installs what it needs into
target/schemathesis (a virtual environment, from PyPI). The server has a short context, so that answers are short.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import urllib.request
import venv

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOME = ROOT / "target/schemathesis"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance"
# Memory that may come and go: caches of prompts, which have a bound of their own, and the allocator's.
ALLOWANCE = 48 << 20


def install():
    python = HOME / "bin/python"
    if not python.exists():
        venv.create(HOME, with_pip=True)
    packages = ["schemathesis>=4,<5", "openapi-spec-validator"]
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def start(sluice, model, log):
    flags = ["--port", "0", "--max-context", "48", "--no-request-log", "--threads", "2", f"--prompt-cache={HOME / 'prompts'}"]
    server = subprocess.Popen([sluice, "serve", model, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    address = None
    for line in server.stderr:
        log.append(line)
        found = re.search(r"listening on (http://\S+)", line)
        address = found.group(1) if found else address
        if "ready" in line:
            break
    # The server's later output must go somewhere.
    threading.Thread(target=lambda: log.extend(server.stderr), daemon=True).start()
    if not address:
        sys.exit("the server did not start:\n" + "".join(log))
    return server, address


def resident(server):
    status = pathlib.Path(f"/proc/{server.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status).group(1)) << 10


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", type=int, default=10_000)
    options.add_argument("--model", default=str(ROOT / "models/demo"))
    options.add_argument("--sluice", default=str(ROOT / "target/release/sluice"))
    options.add_argument("--seed", type=int, default=1)
    options = options.parse_args()
    python = install()
    log, memory = [], []
    server, address = start(options.sluice, options.model, log)
    try:
        # 1. The document itself
        document = HOME / "openapi.json"
        document.write_bytes(urllib.request.urlopen(f"{address}/openapi.json").read())
        subprocess.run([python, "-m", "openapi_spec_validator", document], check=True)
        operations = [
            (method, path) for path, item in json.loads(document.read_text())["paths"].items() for method in item
            if method in ("get", "post", "delete")
        ]
        # 2. Requests: as many for each operation that takes anything
        each = -(-options.cases // max(1, len(operations) - 7))
        command = [
            HOME / "bin/schemathesis", "run", document, "--url", address, "--checks", CHECKS, "--mode", "all", "--phases", "examples,coverage,fuzzing",
            "--max-examples", str(each), "--seed", str(options.seed), "--workers", "2", "--continue-on-failure", "--request-timeout", "120", "--suppress-health-check", "all", "--no-shrink",
        ]
        # It leaves a folder of its own where it runs.
        environment = {**os.environ, "COLUMNS": "160"}
        run = subprocess.Popen(command, cwd=HOME, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        lines = []
        reader = threading.Thread(target=lambda: lines.extend(run.stdout))
        reader.start()
        begun = time.monotonic()
        while run.poll() is None and server.poll() is None:
            memory.append((time.monotonic() - begun, resident(server)))
            time.sleep(1)
        status = run.wait()
        reader.join()
        (HOME / "report.txt").write_text("".join(lines))
        print("".join(lines[-60:]))
        # 3. The server
        alive = server.poll() is None and urllib.request.urlopen(f"{address}/health").status == 200
        panics = [line for line in log if "panicked" in line]
        middle, last = memory[len(memory) // 2][1], memory[-1][1]
        print(f"{len(operations)} operations, {memory[-1][0]:.0f} s; resident {memory[0][1] >> 20} MiB at first, "
              f"{middle >> 20} in the middle, {last >> 20} at the end; {len(panics)} panics; {'alive' if alive else 'DEAD'}")
        grown = last - middle > ALLOWANCE
        sys.exit(1 if status or panics or not alive or grown else 0)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
