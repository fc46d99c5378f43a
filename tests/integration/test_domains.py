# SPDX-License-Identifier: Apache-2.0
"""Fault domains: whose worker serves whom, what one domain's end does to the others, who waits and who is refused."""
import json
import os
import signal
import socket
import struct
import subprocess
import time

import exl3ref as ref
from harness import WAIT, Skipped, Survivor, check, equal, kill_under, wait_for

BATCH, TEAM_GID = 12345, 23456  # any numbers: no names are needed
AS_BATCH = {"user": BATCH, "group": 0, "extra_groups": []}
AS_TEAM = {"user": BATCH + 1, "group": 0, "extra_groups": [TEAM_GID]}


def daemon(env, *args, models=("layers",), **kw):
    if os.getuid() != 0:
        raise Skipped("needs root, to be several users")
    os.chmod(env.tmp, 0o711)
    return env.daemon(models, ["--domain", f"batch={BATCH}", *args], **kw)


def status(d, **who):
    return json.loads(d.ctl_ok("status", "--json", **who))


def names(d, **who):
    return {m["name"]: m["state"] for m in status(d, **who)["models"]}


def one_request(env, d, name="layers", **who):
    x, y = env.path("x.npy"), f"/tmp/exl3-it-{os.getpid()}-{who.get('user', 0)}.npy"
    if not os.path.exists(x):
        ref.npy_save(x, "<f4", (1, 256), [0.01 * i for i in range(256)])
        os.chmod(x, 0o644)
    try:
        return d.ctl("run", "linear", name, "k4.mul1", x, "-o", y, **who)
    finally:
        if os.path.exists(y):
            os.unlink(y)


def survivor(env, d, **who):
    return Survivor(env, d.sock, "tiny-llama", "model.layers.0.mlp.down_proj", "2", **who)


def kill_worker(d, under=(), **who):
    """Ends the worker that serves @who, perhaps while survivors wait for it; its generation."""
    s = status(d, **who)
    kill_under(s["worker_pid"], under)
    wait_for(lambda: not os.path.exists(f"/proc/{s['worker_pid']}"), "its end")
    return s["generation"]


def test_users_and_groups(env):
    """The kernel says who connects; a user counts before a group, all others are in 'default'."""
    d = daemon(env, "--domain", f"team=@{TEAM_GID},98765")
    equal(status(d)["domain"], "default", "root")
    equal(status(d, **AS_BATCH)["domain"], "batch", f"uid {BATCH}")
    equal(status(d, **AS_TEAM)["domain"], "team", f"a supplementary group {TEAM_GID}")
    equal(status(d, **dict(AS_BATCH, extra_groups=[TEAM_GID]))["domain"], "batch", "a user of one and a group of another")
    workers = {status(d, **who)["worker_pid"] for who in ({}, AS_BATCH, AS_TEAM)}
    equal(len(workers), 3, "workers")
    for who in ({}, AS_BATCH, AS_TEAM):
        rc, _, err = one_request(env, d, **who)
        equal(rc, 0, f"a request in {status(d, **who)['domain']} ({err.strip()})")
    check("domain batch, generation 1" in d.ctl_ok("status", **AS_BATCH), "exl3ctl status does not name domain and generation")
    equal(len({status(d, **who)["supervisor_pid"] for who in ({}, AS_BATCH)}), 1, "supervisors")
    equal(d.stop(), 0, "status after SIGTERM")
    for pid in workers:
        check(not os.path.exists(f"/proc/{pid}"), f"worker {pid} is still there")


def test_an_administrator_looks_into_another_domain(env):
    """exl3ctl --domain: handed on to that domain's worker, and back out again; others may not."""
    d = daemon(env)
    ours, theirs = status(d)["worker_pid"], status(d, **AS_BATCH)["worker_pid"]
    before, fds = d.settled(), settled_fds(d)
    for _ in range(3):
        s = json.loads(d.ctl_ok("--domain", "batch", "status", "--json"))
        equal((s["domain"], s["worker_pid"]), ("batch", theirs), "exl3ctl --domain batch status")
        equal(json.loads(d.ctl_ok("--domain", "default", "status", "--json"))["worker_pid"], ours, "its own by name")
    mine = env.spawn(env.program("tests/integration/limits"), d.sock, "idle", stdin=subprocess.PIPE, stdout=subprocess.PIPE, **AS_BATCH)
    mine.stdout.readline()
    clients = json.loads(d.ctl_ok("--domain", "batch", "ps", "--json"))["clients"]
    equal(sorted((c["uid"], c["name"]) for c in clients), [(0, "exl3ctl"), (BATCH, "idle")], "exl3ctl --domain batch ps")
    x = env.path("x.npy")
    equal(one_request(env, d)[0], 0, "a request at home")
    d.ctl_ok("--domain", "batch", "run", "linear", "layers", "k4.mul1", x, "-o", env.path("y.npy"))
    rc, _, err = d.ctl("--domain", "nonesuch", "status")
    check(rc == 4 and "no fault domain 'nonesuch'" in err, f"a domain that there is not: status {rc}, {err}")
    rc, _, err = d.ctl("--domain", "default", "status", **AS_BATCH)
    check(rc == 3 and "may choose a fault domain" in err, f"somebody else: status {rc}, {err}")
    kill_worker(d, **AS_BATCH)  # one that wants a worker that is away waits, as others do
    equal(json.loads(d.ctl_ok("--domain", "batch", "status", "--json"))["generation"], 2, "the next worker")
    mine.kill()
    mine.wait()
    d.wait_held(before, "after connections that were handed on")
    equal(settled_fds(d), fds, "descriptors of the supervisor")
    equal(d.stop(), 0, "status after SIGTERM")


def test_configuration(env):
    """What cannot be meant is refused with the line that says it."""
    program, conf = env.program("exl3-daemon"), env.path("domains.conf")
    for text, word in (("[domain a]\nusers = 1, 2\n[domain b]\nusers = 2\n", "user 2 is in two domains"),
                       ("[domain a]\nusers = no-such-user-here\n", "no user 'no-such-user-here'"),
                       ("[domain a]\nusers = @no-such-group-here\n", "no group 'no-such-group-here'"),
                       ("[domain a]\n", ":1: a section without a key"),
                       ("[domain a]\nuser = 1\n", "unknown key 'user'"),
                       ("[domain default]\nusers = 1\n", "'default' is there already"),
                       ("domain = ../x=1\n", "letters, digits"),
                       ("[domain a]\nusers = ,\n", "users is empty")):
        with open(conf, "w") as f:
            f.write(text)
        rc, out, err = env.run(program, "--config", conf, "--check-config")
        check(rc != 0 and word in err, f"{text!r}: status {rc}, {out}{err}")
    with open(conf, "w") as f:
        f.write("[domain a]\nusers = root, 7, @root\n")
    rc, out, err = env.run(program, "--config", conf, "--check-config")
    check(rc == 0 and "domain = a=root, 7, @root" in out, f"a good file: status {rc}, {out}{err}")


def test_one_dies_the_other_does_not_notice(env):
    """Worker killed until its domain gives up: a client of the other domain goes on without an error; SIGHUP tries again."""
    d = daemon(env, "--restart-limit", "2", "--restart-window", "600", models=("layers", "tiny-llama"))
    before = status(d)
    command = [env.program("examples/tiny_llama"), "--socket", d.sock, "--model", "tiny-llama", "generate", "--prompt",
               "The bridge over the river", "--tokens", "200" if env.short else "400"]
    rc, want, err = env.run(*command)
    equal(rc, 0, f"alone ({err})")
    writer = env.spawn(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    here, there = survivor(env, d), survivor(env, d, **AS_BATCH)
    for generation in (1, 2, 3):
        equal(kill_worker(d, under=[there] if generation == 1 else [], **AS_BATCH), generation, "generation of batch")
        if generation < 3:
            wait_for(lambda g=generation: d.ctl("status", **AS_BATCH)[0] == 0 and status(d, **AS_BATCH)["generation"] == g + 1,
                     "next generation")
        if generation == 1:
            wait_for(lambda: one_request(env, d, **AS_BATCH)[0] == 0, "a request in batch")
            wait_for(lambda: there.backs >= 2, "both threads of a client of batch, which are served again")
            counts = there.end()
            check(counts["stale"] > 0 and counts["reconnects"] > 0, f"a client of batch that has noticed nothing: {counts}")
    counts = here.end()
    check(counts["requests"] > 0, f"a client of the other domain: {counts}")
    equal((counts["stale"], counts["reconnects"]), (0, 0), "what it has noticed")
    wait_for(lambda: "giving up" in d.log(), "the end of batch")
    check("domain batch: the worker died 3 times" in d.log(), f"the log does not name the domain: {d.log()[-500:]}")
    rc, _, err = d.ctl("status", **AS_BATCH)
    equal(rc, 4, "status of a domain that has given up")
    check("domain batch: its worker died too often" in err, f"the client is not told why: {err}")
    domains = {v["name"]: v for v in d.json("domains")["domains"]}
    equal([(n, v["state"], v["generation"]) for n, v in domains.items()], [("default", "serving", 1), ("batch", "given-up", 3)],
          "exl3ctl domains")
    equal(domains["default"]["worker_pid"], before["worker_pid"], "worker in exl3ctl domains")
    rc, _, err = d.ctl("domains", **AS_BATCH)
    check(rc == 3 and "only root" in err, f"exl3ctl domains of somebody else: status {rc}, {err}")
    out, err = writer.communicate(timeout=WAIT)
    equal(writer.returncode, 0, f"a client of the other domain ({err})")
    equal(out, want, "its text")
    after = status(d)
    equal((after["worker_pid"], after["generation"]), (before["worker_pid"], 1), "the other domain's worker")
    d.proc.send_signal(signal.SIGHUP)
    wait_for(lambda: d.ctl("status", **AS_BATCH)[0] == 0, "batch after SIGHUP")
    wait_for(lambda: set(names(d, **AS_BATCH).values()) == {"ready"}, "its models")
    equal(one_request(env, d, **AS_BATCH)[0], 0, "a request in batch")
    equal(status(d, **AS_BATCH)["generation"], 4, "generation of batch")
    # Who may administer sees what happened to all, others what happened to theirs.
    kinds = [e["kind"] for e in d.json("events")["events"] if e["domain"] == "batch"]
    equal(kinds.count("died"), 3, f"deaths in {kinds}")
    check("given-up" in kinds and kinds.index("given-up") > kinds.index("died"), f"events of batch: {kinds}")
    equal({e["domain"] for e in json.loads(d.ctl_ok("events", "--json", **AS_BATCH))["events"]}, {"batch"}, "what batch sees")
    equal(d.stop(), 0, "status after SIGTERM")


def test_all_die(env):
    """Only when no domain is left does the daemon end."""
    d = daemon(env, "--restart-limit", "0")
    kill_worker(d, **AS_BATCH)
    wait_for(lambda: "giving up" in d.log(), "the end of batch")
    equal(status(d)["domain"], "default", "the other")
    kill_worker(d)
    equal(d.wait_exit(), 3, "status of the daemon")


def test_events_without_a_worker(env):
    """Whoever may ask the supervisor learns why its own domain is gone."""
    if os.getuid() != 0:
        raise Skipped("needs root, to be several users")
    os.chmod(env.tmp, 0o711)
    d = env.daemon(("layers",), ["--domain", "mine=0", "--restart-limit", "0"])
    kill_worker(d)
    wait_for(lambda: "giving up" in d.log(), "the end of mine")
    rc, _, err = d.ctl("status")
    check(rc == 4 and "domain mine" in err, f"status: {rc}, {err}")
    kinds = [e["kind"] for e in d.json("events")["events"] if e["domain"] == "mine"]
    equal(kinds[-2:], ["died", "given-up"], "events of mine")
    check("given-up" in d.ctl_ok("events") and "given-up" in d.ctl_ok("domains"), "text for people")
    equal(d.stop(), 0, "status after SIGTERM")


def test_models_are_the_same_everywhere(env):
    """load and unload reach every domain, whoever asks; a new worker of any domain has them."""
    d = daemon(env)
    d.ctl_ok("load", f"llama={env.model('tiny-llama')}")
    wait_for(lambda: names(d, **AS_BATCH) == {"layers": "ready", "llama": "ready"}, "the model in the other domain")
    rc, _, err = d.ctl("load", "bad=/nonexistent")
    equal(rc, 3, f"a load that is refused ({err.strip()})")
    equal(names(d, **AS_BATCH), {"layers": "ready", "llama": "ready"}, "models of batch after a refusal")
    kill_worker(d, **AS_BATCH)
    wait_for(lambda: d.ctl("status", **AS_BATCH)[0] == 0, "another worker")
    wait_for(lambda: names(d, **AS_BATCH) == {"layers": "ready", "llama": "ready"}, "models of the second worker")
    d.ctl_ok("unload", "llama")
    wait_for(lambda: names(d, **AS_BATCH) == {"layers": "ready"}, "the unload in the other domain")
    rc, _, err = d.ctl("unload", "layers", **AS_BATCH)
    check(rc == 3 and "only root" in err, f"unload by somebody else: status {rc}, {err}")
    kill_worker(d)
    wait_for(lambda: d.ctl("status")[0] == 0 and names(d) == {"layers": "ready"}, "models of a new worker")
    d.ctl_ok("drain")
    equal(d.wait_exit(), 0, "status after drain")


def test_clients_wait_for_the_worker(env):
    """Connections that come while the worker is away are served by the next one, in time."""
    d = daemon(env, "--restart-limit", "10")
    for _ in range(4):  # from now on a restart waits 2.5 s
        kill_worker(d, **AS_BATCH)
        wait_for(lambda: d.ctl("status", **AS_BATCH)[0] == 0, "another worker")
    kill_worker(d, **AS_BATCH)
    procs = [env.spawn(env.program("exl3ctl"), "--socket", d.sock, "status", "--json", stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE, text=True, **AS_BATCH) for _ in range(20)]
    equal(status(d)["domain"], "default", "the other domain meanwhile")
    for proc in procs:
        out, err = proc.communicate(timeout=WAIT)
        equal(proc.returncode, 0, f"a client that came while the worker was away ({err.strip()})")
        equal(json.loads(out)["generation"], 6, "generation that served it")


def settled_fds(d):
    """Of the supervisor, when it has closed what it has handed on."""
    until, last = time.monotonic() + WAIT, None
    while True:
        now = d.fds(d.proc.pid)
        if now == last or time.monotonic() > until:
            return now
        last = now
        time.sleep(0.2)


class Lingering:
    """TCP sockets with data that nobody reads, and SO_LINGER: closing the last descriptor waits for an hour. They are
    sent in packets that nobody reads either, so the close is that of whoever drops the connection."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.far = []

    def send(self, sock):
        near = socket.create_connection(self.listener.getsockname())
        self.far.append(self.listener.accept()[0])
        near.setblocking(False)
        try:
            while True:
                near.send(bytes(1 << 20))
        except BlockingIOError:
            pass
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
        socket.send_fds(sock, [b"x"], [near.fileno()])
        near.close()

    def end(self):
        for s in self.far:
            s.close()
        self.listener.close()


def connect(d):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(d.sock)  # waits while the daemon is busy with those before it
    return s


def test_a_worker_that_does_not_read(env):
    """So many connections wait for it, no more; the refusal says so, other domains go on, and all come back."""
    if os.getuid() != 0:
        raise Skipped("needs root, to be several users")
    os.chmod(env.tmp, 0o711)
    d = env.daemon(("layers",), ["--domain", "mine=0", "--clients-max", "2000"])  # this process is alone in it
    before = status(d, **AS_BATCH)
    pid = d.worker_pid()
    held = settled_fds(d)
    os.kill(pid, signal.SIGSTOP)
    socks, refused, lingering = [], 0, Lingering()
    for _ in range(1200):  # what its socket takes, what waits, and some more
        socks.append(connect(d))
    wait_for(lambda: "already" in d.log(), "the first refusal")
    for s in socks:
        s.setblocking(False)
        try:
            refused += b"clients wait for its worker already" in s.recv(65536)
        except BlockingIOError:
            pass
    check(0 < refused < 1100, f"{refused} of 1200 connections were refused")
    # Some whose last close, the daemon's, takes an hour: they have sent before they can be refused.
    os.kill(d.proc.pid, signal.SIGSTOP)
    for _ in range(20):
        socks.append(connect(d))
        lingering.send(socks[-1])
    os.kill(d.proc.pid, signal.SIGCONT)
    equal(status(d, **AS_BATCH)["worker_pid"], before["worker_pid"], "the other domain's worker")
    rc, _, err = d.ctl("status")
    check(rc == 4 and "try again later" in err, f"exl3ctl is not told why: status {rc}, {err}")
    os.kill(pid, signal.SIGCONT)
    for s in socks:
        s.close()
    lingering.end()
    wait_for(lambda: d.ctl("status")[0] == 0, "the domain")
    equal(d.worker_pid(), pid, "its worker")
    equal(settled_fds(d), held, "descriptors of the supervisor")


def test_reload_moves_users(env):
    """SIGHUP takes over the lists of users; other domains need a restart, which is said."""
    if os.getuid() != 0:
        raise Skipped("needs root, to be several users")
    os.chmod(env.tmp, 0o711)
    conf = env.path("users.conf")

    def write(text):
        with open(conf, "w") as f:
            f.write(text)
    write(f"[domain a]\nusers = {BATCH}\n[domain b]\nusers = {BATCH + 1}\n")
    d = env.daemon(("layers",), ["--config", conf])
    equal(status(d, **AS_BATCH)["domain"], "a", "before")
    write(f"[domain b]\nusers = {BATCH}\n[domain a]\nusers = {BATCH + 1}\n")
    os.kill(d.proc.pid, signal.SIGHUP)
    wait_for(lambda: status(d, **AS_BATCH)["domain"] == "b", "the new list")
    equal(status(d, **AS_TEAM)["domain"], "a", "the other one")
    write(f"[domain c]\nusers = {BATCH}\n")
    os.kill(d.proc.pid, signal.SIGHUP)
    wait_for(lambda: "domains of the configuration are others" in d.log(), "a word about it")
    equal(status(d, **AS_BATCH)["domain"], "b", "after a list that needs a restart")
