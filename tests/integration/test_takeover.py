# SPDX-License-Identifier: Apache-2.0
"""Without systemd: a new daemon takes the place of the one that serves, and exl3ctl fds."""
import os
import socket
import threading
import time

import test_outlive as outlive
import test_reconnect as reconnect
import test_stream as stream
from harness import WAIT, check, equal, wait_for


class Callers:
    """Processes that connect, compute and end, all the time; and connections that nobody may refuse."""

    def __init__(self, env, d, first):
        self.env, self.d, self.first = env, d, first
        self.stop, self.failed, self.results, self.connections = False, [], 0, 0
        self.threads = [threading.Thread(target=self.run), threading.Thread(target=self.connect)]
        for t in self.threads:
            t.start()

    def run(self):
        while not self.stop:
            try:
                equal(outlive.result_llama(self.env, self.d), self.first, "result")
                self.results += 1
            except Exception as e:
                self.failed.append(e)

    def connect(self):
        while not self.stop:
            s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            s.settimeout(WAIT)
            try:
                s.connect(self.d.sock)
                self.connections += 1
            except OSError as e:
                self.failed.append(e)
            s.close()
            time.sleep(0.002)

    def end(self):
        self.stop = True
        for t in self.threads:
            t.join()
        check(not self.failed, f"{len(self.failed)} failed, the first: {self.failed[:1]}")


def take_over(env, d, model, **kw):
    new = env.daemon((model,), ["--takeover", *kw.pop("args", [])], sock=d.sock, wait=False, **kw)
    return new


def test_nobody_notices(env):
    """Clients come and go all the time; the weights stay where they are; the old daemon leaves."""
    path = outlive.checkpoint(env, "over", "tiny-llama")
    size = os.path.getsize(os.path.join(path, "model.safetensors"))
    d = env.daemon((f"m={path}",))
    d.ctl_ok("load", f"late={env.model('layers')}")
    first, late = outlive.result_llama(env, d), outlive.result(env, d, "late")
    slabs = slabs_of(d)
    callers = Callers(env, d, first)
    for _ in range(2):
        before = callers.results
        new = take_over(env, d, f"m={path}")
        equal(d.wait_exit(), 0, "status of the old daemon")
        check("another daemon has taken over" in d.log(), d.log())
        wait_for(lambda: "taken over from the other daemon" in new.log(), "the new daemon's word")
        wait_for(lambda: callers.results > before + 3 or callers.failed, "more results")
        equal(new.log().count("ready, adopted"), 2, "adoptions")
        if env.backend == "cpu":
            equal(slabs_of(new), slabs, "slabs that are mapped")
            check(outlive.read_bytes(new.worker_pid()) < size, "weights were read")
        equal(new.status()["supervisor_pid"], new.proc.pid, "who serves")
        d = new
    callers.end()
    check(callers.connections > 10, f"only {callers.connections} connections")
    equal(outlive.result(env, d, "late"), late, "a model that a client had loaded")
    equal(d.stop(), 0, "status")
    check(not os.path.exists(d.sock) and not os.path.exists(d.sock + ".admin"), "sockets are left behind")


def slabs_of(d):
    with open(f"/proc/{d.worker_pid()}/maps") as f:
        return {line.split()[4] for line in f if "memfd:exl3-slab" in line}


def test_new_daemon_fails(env):
    """A new daemon that cannot serve changes nothing."""
    d = env.daemon(("layers",))
    first = outlive.result(env, d, "layers")
    new = take_over(env, d, "bad=/nowhere")
    equal(new.wait_exit(), 1, "status of the new daemon")
    equal(outlive.result(env, d, "layers"), first, "the old one serves")
    new = take_over(env, d, "layers")
    equal(d.wait_exit(), 0, "status of the old daemon")
    equal(outlive.result(env, new, "layers"), first, "the new one serves")


def test_nothing_to_take_over(env):
    new = env.daemon((), ["--takeover"], wait=False)
    equal(new.wait_exit(), 1, "status")
    check("no daemon to take over from" in new.log(), new.log())


def ask_for_all(d):
    """What a new daemon does until "end"; returns the connection, the listening socket and the last packet."""
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.settimeout(WAIT)
    s.connect(d.sock + ".admin")
    s.send(b"takeover 2")
    listener = None
    while True:
        data, fds, _, _ = socket.recv_fds(s, 20000, 16)
        for fd in fds:
            if data.startswith(b"listen") and not listener:
                listener = socket.socket(fileno=fd)
            else:
                os.close(fd)
        if not data or data == b"end" or data.startswith(b"error"):
            return s, listener, data


def test_one_at_a_time(env):
    """A second one that would take over is told so: of two that wait, both would serve when the old one has gone."""
    d = env.daemon(("layers",))
    first, listener, data = ask_for_all(d)
    equal(data, b"end", "what the first one gets")
    second, none, data = ask_for_all(d)
    check(data.startswith(b"error ") and b"already" in data and not none, f"the second one gets {data}")
    third = take_over(env, d, "layers")
    equal(third.wait_exit(), 1, "status of a third one")
    check("taking over already" in third.log(), third.log())
    for s in (first, listener, second):
        s.close()
    new = take_over(env, d, "layers")  # nobody takes over any more
    equal(d.wait_exit(), 0, "status of the old daemon")
    equal(new.status()["supervisor_pid"], new.proc.pid, "who serves")


def test_new_daemon_dies_when_it_may_go(env):
    """Until it says that it serves there is the old one: it never stops to accept, and goes on."""
    d = env.daemon(("layers",))
    first = outlive.result(env, d, "layers")
    for _ in range(2):
        s, listener, data = ask_for_all(d)
        equal(data, b"end", "what the new one gets")

        def may_go(s=s):
            s.send(b"ready")
            return s.recv(100) == b"go"
        wait_for(may_go, "its turn")
        equal(outlive.result(env, d, "layers"), first, "a client of the old one that comes now")
        check(ask_for_all(d)[2].startswith(b"error "), "another one is let in meanwhile")
        for c in (s, listener):
            c.close()
        wait_for(lambda: "has gone: going on" in d.log(), "the old one's word")
        equal(outlive.result(env, d, "layers"), first, "the old one serves")
        equal(d.ctl("fds")[0], 0, "its own socket")
    check("another daemon has taken over" not in d.log(), d.log())
    new = take_over(env, d, "layers")
    equal(d.wait_exit(), 0, "status of the old daemon")
    equal(outlive.result(env, new, "layers"), first, "one that lives takes over")


def test_old_daemon_ends_meanwhile(env):
    """Told to end while another one takes over: its sockets' paths are there for the other one."""
    d = env.daemon(("layers",))
    s, listener, data = ask_for_all(d)
    equal(data, b"end", "what the new one gets")
    equal(d.stop(), 0, "status of the old daemon")
    equal(s.recv(100), b"", "the end of the connection")
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(d.sock)  # somebody holds the socket and will serve
    listener.settimeout(WAIT)
    listener.accept()[0].close()
    for c in (client, s, listener):
        c.close()
    new = env.daemon(("layers",), sock=d.sock)  # what is left behind is in nobody's way
    equal(new.status()["supervisor_pid"], new.proc.pid, "who serves")


def test_client_that_stays(env):
    """A long-lived client of the old daemon gets some time, then it is told to connect again."""
    d = env.daemon(("layers",))
    outlive.result(env, d, "layers")
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(d.sock)
    d.ctl_ok("ps")
    start = time.monotonic()
    take_over(env, d, "layers")
    s.settimeout(WAIT)
    equal(s.recv(100), b"", "the end of the connection")
    check(1 < time.monotonic() - start, "it had no time")
    equal(d.wait_exit(), 0, "status")
    s.close()


def test_clients_that_work_go_on(env):
    """With requests all the time, through two hand-overs: as after the end of a worker, none gets an error, and
    none waits for one whose stream call is never ready."""
    model = f"{reconnect.MODEL}={env.model(reconnect.MODEL)}"
    d = env.daemon((model,))
    survivors = [reconnect.survivor(env, d, 3), reconnect.survivor(env, d, 1, "manual")]
    for i in range(2):
        silent = stream.spawn(env, d, "silent")
        new = take_over(env, d, model)
        equal(d.wait_exit(), 0, "status of the old daemon")
        check("still running" not in d.log(), d.log())
        silent.kill()
        new.wait_ready()
        for s in survivors:
            wait_for(lambda s=s, n=i: s.backs > n, f"{s.args}, which is served again")
        d = new
    for s in survivors:
        got = s.end()
        check(got["reconnects"] >= 2, f"{got['reconnects']} reconnections for 2 hand-overs")


def test_fds(env):
    """What is kept, how large, by whom it is used; dropped, it is loaded from the files again."""
    d = env.daemon((f"m={outlive.checkpoint(env, 'fds')}", "tiny-llama"))
    fds = d.json("fds")["fds"]
    equal([(f["model"], f["part"]) for f in fds],
          [(m, p) for m in ("m", "tiny-llama") for p in ("manifest", "slab", "tensors")], "listed")
    weights = {m["name"]: m["weight_bytes"] for m in d.status()["models"]}
    equal({f["model"]: f["bytes"] for f in fds if f["part"] == "slab"}, weights, "bytes of the slabs")
    equal({f["domains"] for f in fds}, {"default"}, "users")
    check("m " in d.ctl_ok("fds"), "the table")
    rc, _, err = d.ctl("fds", "drop", "nobody")
    equal((rc, "nothing is kept" in err), (3, True), "what is not kept")
    equal(d.ctl("fds", "what", "m")[0], 2, "a wrong word")
    first = outlive.result(env, d)
    d.ctl_ok("fds", "drop", "m")
    equal({f["model"] for f in d.json("fds")["fds"]}, {"tiny-llama"}, "left")
    equal(outlive.result(env, d), first, "it serves on")
    outlive.next_worker(d, d.worker_pid())
    equal(outlive.result(env, d), first, "loaded again")
    equal((d.log().count("m: ready,"), d.log().count("m: ready, adopted")), (2, 0), "loads of it, adoptions")
    equal({f["model"] for f in d.json("fds")["fds"]}, {"m", "tiny-llama"}, "kept again")


def test_admin_socket_is_private(env):
    d = env.daemon()
    equal(oct(os.stat(d.sock + ".admin").st_mode & 0o777), oct(0o600), "mode")
    for words in (b"what", b"x" * 1000, b"drop ", b"takeover 1", b"ready", b"serving"):
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        s.settimeout(WAIT)
        s.connect(d.sock + ".admin")
        s.send(words)
        answer = s.recv(1000)
        check(answer.startswith((b"error ", b"wait")), f"{words[:20]}: {answer}")
        s.close()
    idle = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(8)]
    for s in idle:
        s.connect(d.sock + ".admin")
    time.sleep(0.1)
    d.ctl_ok("status")
    for s in idle:
        s.close()
    wait_for(lambda: d.ctl("fds")[0] == 0, "fds after the idle ones have gone")
