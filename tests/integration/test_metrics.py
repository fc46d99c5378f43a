# SPDX-License-Identifier: Apache-2.0
"""Metrics: every line is Prometheus' text format, numbers are right, and a scraper that stalls delays nobody."""
import json
import os
import re
import signal
import socket

from harness import WAIT, check, equal, wait_for
from test_tenants import AS_BATCH, MODULE, READY, need_root, say

DEVICE = False

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABELS = r'\{[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"(?:,[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*")*\}'
VALUE = r"[+-]?(?:[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|Inf|NaN)"


def fetch(where, target="/metrics", seconds=WAIT):
    """The body of an answer over a Unix socket (a path) or TCP (a port)."""
    s = socket.socket(socket.AF_INET if isinstance(where, int) else socket.AF_UNIX)
    s.settimeout(seconds)
    s.connect(("127.0.0.1", where) if isinstance(where, int) else where)
    with s:
        s.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        data = b""
        while True:
            part = s.recv(65536)
            if not part:
                break
            data += part
    head, _, body = data.partition(b"\r\n\r\n")
    check(head.startswith(b"HTTP/1.1 200 OK\r\n"), f"answer: {head[:200]!r}")
    length = int(re.search(rb"Content-Length: (\d+)", head).group(1))
    equal(len(body), length, "length of the answer")
    check(b"Content-Type: text/plain; version=0.0.4" in head, f"content type: {head!r}")
    return body.decode()


def parse(text):
    """{series: value}; checks every line, and what Prometheus' conventions ask of names, types and histograms."""
    values, types, family = {}, {}, None
    check(text.endswith("\n"), "the text ends in the middle of a line")
    for line in text.splitlines():
        m = re.fullmatch(rf"# HELP ({NAME}) (.+)", line)
        if m:
            family = m.group(1)
            check(family not in types and re.fullmatch(r"exl3_[a-z0-9_]+", family), f"family {family}")
            continue
        m = re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge|histogram)", line)
        if m:
            equal(m.group(1), family, "HELP and TYPE of one family follow each other")
            types[family] = m.group(2)
            equal(family.endswith("_total"), types[family] == "counter", f"{family} is a {types[family]}")
            check(not re.search(r"_(ms|us|ns|milliseconds|kib|mib|kb|mb)(_|$)", family), f"{family}: not a base unit")
            continue
        m = re.fullmatch(rf"({NAME})({LABELS})? ({VALUE})", line)
        check(m, f"no line of the format: {line!r}")
        name = m.group(1)
        base = re.sub(r"_(bucket|sum|count)$", "", name) if types.get(family) == "histogram" else name
        equal(base, family, f"{line!r} is of its family")
        series = name + (m.group(2) or "")
        check(series not in values, f"twice: {series}")
        values[series] = float(m.group(3))
    for family, kind in types.items():
        if kind != "histogram":
            continue
        for series in [s for s in values if s.startswith(f"{family}_count")]:
            labels = series[len(family) + 6:]
            steps = [(float(re.search(r'le="([^"]+)"', s).group(1).replace("+Inf", "inf")), v) for s, v in values.items()
                     if s.startswith(f"{family}_bucket") and labels[1:-1] in s]
            check(steps == sorted(steps) and [v for _, v in steps] == sorted(v for _, v in steps), f"{family}{labels}: {steps}")
            equal(steps[-1], (float("inf"), values[series]), f"{family}{labels}: the last bucket and the count")
            check(f"{family}_sum{labels}" in values, f"{family}{labels} has no sum")
    return values


def test_format_and_numbers(env):
    """What a client did is what is counted, by operation, tenant and code."""
    d = env.daemon(("tiny-llama",), ("--metrics-port", "0"))
    path = d.sock + ".metrics"
    before = parse(fetch(path))
    equal(before["exl3_worker_generation"], 1, "generation")
    equal(before['exl3_requests_total{op="linear",tenant="default",code="ok"}'] if
          'exl3_requests_total{op="linear",tenant="default",code="ok"}' in before else 0, 0, "requests at first")
    told = say(env, d, "hello", *READY, "linear:3:20", "linear:0:2")
    equal([t[1] for t in told][-2:], [0, -22], "what the client did")
    wait_for(lambda: parse(fetch(path))["exl3_clients"] == 0, "the client to be gone")
    v = parse(fetch(path))
    equal(v['exl3_requests_total{op="linear",tenant="default",code="ok"}'], 20, "requests")
    equal(v['exl3_requests_total{op="linear",tenant="default",code="EINVAL"}'], 2, "errors")
    equal(v['exl3_rows_total{tenant="default"}'], 60, "rows")
    equal(v['exl3_queue_seconds_count{tenant="default"}'], 20, "queue times")
    equal(v['exl3_launch_rows_sum{op="linear"}'], 60, "rows of launches")
    launches = v['exl3_device_seconds_count{op="linear"}']
    equal(v['exl3_launch_rows_count{op="linear"}'], launches, "launches by rows and by time")
    check(0 < v['exl3_device_seconds_sum{op="linear"}'] < 60, "device time")
    bytes_of = {m["name"]: m["bytes"] for m in d.json("modules", "tiny-llama")["modules"]}
    equal(v['exl3_weight_read_bytes_total{op="linear"}'], launches * bytes_of[MODULE], "weights read")
    equal(v['exl3_model_rows_total{model="tiny-llama"}'], 60, "rows of the model")
    equal(v['exl3_model_bytes{model="tiny-llama",kind="weights"}'], d.status()["models"][0]["weight_bytes"], "weights held")
    for gauge in ("exl3_tenant_bytes", "exl3_ring_credits"):
        for series in [s for s in v if s.startswith(gauge)]:
            equal(v[series], 0, f"{series} with no client")
    equal(d.stop(), 0, "status after SIGTERM")
    check(not os.path.exists(path), "the socket is still there")


def test_what_is_held(env):
    """Gauges follow clients while nothing else happens."""
    d = env.daemon(("tiny-llama",))
    from test_tenants import Held
    c = Held(env, d, "hello", *READY, "channel:8", "hold")

    def held():
        v = parse(fetch(d.sock + ".metrics"))
        return (v["exl3_clients"], v['exl3_tenant_channels{tenant="default"}'], v['exl3_tenant_bytes{tenant="default",kind="arena"}'],
                v['exl3_ring_credits{tenant="default"}'], v['exl3_tenant_bytes{tenant="default",kind="ring"}'] > 0)
    wait_for(lambda: held() == (1, 2, 8388608, 2 * 64 + 2 * 8, True), f"what is held ({held()})")
    c.end()
    wait_for(lambda: held() == (0, 0, 0, 0, False), "all of it to come back")
    d.stop()


def test_a_stalled_scraper_delays_nobody(env):
    """Scrapers that send half a request, or read nothing: requests and other scrapers go on."""
    # Nobody loses patience with them here: whoever waited for one would wait for ever.
    d = env.daemon(("tiny-llama",), environ={"EXL3_FAULT": "metrics.patience:1:0"})
    path = d.sock + ".metrics"
    stalled = []
    for i in range(40):
        s = socket.socket(socket.AF_UNIX)
        s.settimeout(WAIT)
        s.connect(path)
        s.sendall(b"GET /metr" if i % 2 else b"GET /metrics HTTP/1.1\r\n\r\n")
        stalled.append(s)
        if i % 8 == 7:
            parse(fetch(path))
    told = say(env, d, "hello", *READY, *["linear:1:64"] * 10)
    equal(told[-1][1], 0, "requests beside stalled scrapers")
    stalled[-1].setblocking(False)
    try:
        check(False, f"one that has sent half a request is told {stalled[-1].recv(100)}")
    except BlockingIOError:
        pass
    equal(d.stop(), 0, "status after SIGTERM")
    for s in stalled:
        s.close()


def test_patience_with_scrapers_ends(env):
    d = env.daemon(("tiny-llama",))
    for i in range(4):
        s = socket.socket(socket.AF_UNIX)
        s.settimeout(WAIT)
        s.connect(d.sock + ".metrics")
        s.sendall(b"GET /metr"[:i])
        equal(s.recv(100), b"", "the end of the connection")
        s.close()
    equal(d.stop(), 0, "status after SIGTERM")


def test_generations_and_ports(env):
    """A new worker has the socket and port of the old one, and begins at 0; none means none."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    own = env.path("m.sock")
    d = env.daemon(("tiny-llama",), ("--metrics-socket", own, "--metrics-port", str(port)))
    say(env, d, "hello", *READY, "linear:1:5")
    key = 'exl3_requests_total{op="linear",tenant="default",code="ok"}'
    equal(parse(fetch(port))[key], 5, "over TCP")
    os.kill(d.worker_pid(), signal.SIGKILL)
    wait_for(lambda: "generation 2" in d.log(), "second worker")

    def second(where):
        try:
            return parse(fetch(where)).get("exl3_worker_generation") == 2
        except OSError:
            return False
    wait_for(lambda: second(own), "the socket of the second worker")
    wait_for(lambda: second(port), "the port of the second worker")
    v = parse(fetch(port))
    check(key not in v and v["exl3_worker_restarts_total"] == 1, "numbers of the second worker")
    equal(d.stop(), 0, "status after SIGTERM")
    d = env.daemon(args=("--metrics-socket", "none"))
    check(not os.path.exists(d.sock + ".metrics"), "a socket that was not wanted")
    equal(d.stop(), 0, "status after SIGTERM")


def test_tenants_and_top(env):
    """exl3ctl tenants and top say whose requests they were; a tenant sees its own line only."""
    need_root(env)
    d = env.daemon(("tiny-llama",), ("--tenant", "batch:users=1-99999", "--tenant", "batch:bytes=32M", "--tenant", "batch:requests-per-second=200"))
    say(env, d, "hello", *READY, "linear:2:40", **AS_BATCH)
    v = parse(fetch(d.sock + ".metrics"))
    equal(v['exl3_requests_total{op="linear",tenant="batch",code="ok"}'], 40, "requests of batch")
    check(v['exl3_delayed_total{tenant="batch",limit="requests-per-second"}'] > 0, "delays of batch")
    rows = {t["name"]: t for t in d.json("tenants")["tenants"]}
    equal(sorted(rows), ["batch", "default"], "tenants")
    equal((rows["batch"]["requests"], rows["batch"]["rows"], rows["batch"]["bytes_max"]), (40, 80, 32 << 20), "batch")
    check(rows["batch"]["device_ns"] > 0 and rows["batch"]["delayed"] > 0, f"batch: {rows['batch']}")
    _, out, _ = d.ctl("tenants", "--json", **AS_BATCH)
    equal([t["name"] for t in json.loads(out)["tenants"]], ["batch"], "what batch sees")
    from test_tenants import Held
    c = Held(env, d, "hello", *READY, "hold", *["linear:1:64"] * 1000, **AS_BATCH)
    c.go()

    def busy():
        """What top shows once its interval has met the client, and the rate that it says."""
        out = d.ctl_ok("top", "--interval", "0.3")
        mine = [float(line.split()[0]) for line in out.splitlines() if line.endswith(" batch")]
        check(len(mine) == 1, f"lines of batch: {out}")
        return out if mine[0] > 20 else ""
    out = wait_for(busy, "a picture with the client's rate")
    for word in ("tiny-llama", "batch", "default", "tenants", "launches/s"):
        check(word in out, f"top does not say {word}: {out}")
    equal(out.count("exl3-daemon serving"), 1, "pictures where the output is no terminal")
    equal([p["tenant"] for p in d.json("ps")["clients"] if p["uid"] == AS_BATCH["user"]], ["batch"], "ps")
    c.proc.kill()
    equal(d.stop(), 0, "status after SIGTERM")
