# SPDX-License-Identifier: Apache-2.0
"""What systemd sees: readiness, status, stop, sockets that it made."""
import fcntl
import os
import signal
import socket
import struct
import subprocess
import threading
import time

import test_outlive as outlive
from harness import WAIT, check, equal, wait_for


class Notify:
    """The other end of $NOTIFY_SOCKET."""

    def __init__(self, env):
        self.path = env.path(f"notify-{os.urandom(4).hex()}")
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(self.path)
        self.lines = []
        self.store = []  # (name, descriptor)
        # All the time, as systemd does: a daemon waits for its turn when ten messages are there.
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        while True:
            data, fds, _, _ = socket.recv_fds(self.sock, 4096, 16)
            lines = data.decode().splitlines()
            self.keep(lines, fds)
            self.lines += lines

    def poll(self):
        return self.lines

    def keep(self, lines, fds):
        """FDSTORE and FDSTOREREMOVE, as sd_notify(3) has them."""
        name = next((line[7:] for line in lines if line.startswith("FDNAME=")), "stored")
        if "FDSTORE=1" in lines:
            check(0 < len(name) <= 255 and ":" not in name, f"a name that systemd refuses: {name}")
            self.store += [(name, fd) for fd in fds]
        elif "FDSTOREREMOVE=1" in lines:
            for _, fd in [s for s in self.store if s[0] == name]:
                os.close(fd)
            self.store = [s for s in self.store if s[0] != name]

    def kept(self, nr):
        wait_for(lambda: self.poll() and len(self.store) == nr, f"{nr} descriptors in the store, there are {self.store}")
        return self.store

    def find(self, what):
        """Place in the store of the only descriptor of a file of that name."""
        found = [i for i, (_, fd) in enumerate(self.store) if what in os.readlink(f"/proc/self/fd/{fd}")]
        equal(len(found), 1, f"descriptors of {what}")
        return found[0]

    def replace(self, i, data):
        """Another sealed file in its place."""
        fd = os.memfd_create("exl3-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(fd, data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 15)
        os.close(self.store[i][1])
        self.store[i] = (self.store[i][0], fd)

    def wait(self, word):
        wait_for(lambda: any(line.startswith(word) for line in self.poll()), f"{word} to systemd")


def test_ready_and_stop(env):
    """READY=1 only when the models are there, STOPPING=1 when the daemon drains."""
    notify = Notify(env)
    d = env.daemon((f"layers={env.model('layers')}",), environ={"NOTIFY_SOCKET": notify.path}, wait=False)
    notify.wait("READY=1")
    states = [m["state"] for m in d.status()["models"]]
    equal(states, ["ready"], "models when READY=1 came")
    check(any(line.startswith("STATUS=") for line in notify.poll()), f"no STATUS: {notify.lines}")
    equal(d.stop(), 0, "status after SIGTERM")
    check("STOPPING=1" in notify.poll(), f"no STOPPING=1: {notify.lines}")


def test_not_ready_when_refused(env):
    notify = Notify(env)
    d = env.daemon(("bad=/nonexistent",), environ={"NOTIFY_SOCKET": notify.path}, wait=False)
    equal(d.wait_exit(), 1, "status")
    check("READY=1" not in notify.poll(), f"ready without its model: {notify.lines}")


def test_watchdog(env):
    notify = Notify(env)
    env.daemon(environ={"NOTIFY_SOCKET": notify.path, "WATCHDOG_USEC": "1000000"}, wait=False)
    notify.wait("READY=1")
    notify.wait("WATCHDOG=1")


def test_watchdog_of_a_hanging_worker(env):
    """No WATCHDOG=1 while a worker says nothing; again once there is one that does."""
    notify = Notify(env)
    d = env.daemon(args=["--hang-timeout", "0"], environ={"NOTIFY_SOCKET": notify.path, "WATCHDOG_USEC": "1000000"})
    notify.wait("WATCHDOG=1")
    pid = d.worker_pid()
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1)
    notify.poll()
    notify.lines.clear()
    time.sleep(1)
    check("WATCHDOG=1" not in notify.poll(), f"a hanging worker is called well: {notify.lines}")
    os.kill(pid, signal.SIGKILL)
    notify.wait("WATCHDOG=1")
    equal(d.stop(), 0, "status after SIGTERM")


def test_socket_activation(env):
    """The socket comes from systemd: clients that came before the daemon are served, and it stays afterwards."""
    path = env.path("activated.sock")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen(16)
    early = env.spawn(env.program("exl3ctl"), "--socket", path, "status", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    d = env.daemon((f"layers={env.model('layers')}",), sock=path, activate=listening)
    _, err = early.communicate(timeout=WAIT)
    equal(early.returncode, 0, f"a client that came before the daemon ({err.strip()})")
    equal(d.stop(), 0, "status after SIGTERM")
    check(os.path.exists(path), "the daemon has removed systemd's socket")
    listening.close()


def test_reload(env):
    """SIGHUP takes over what a running worker can, and a broken file changes nothing."""
    conf = env.path("reload.conf")
    with open(conf, "w") as f:
        f.write("clients-max = 5\n")
    d = env.daemon(args=["--config", conf])
    for text, word in (("clients-max = 7\nlog-level = debug\n", ""), ("clients-max = many\n", "clients-max")):
        with open(conf, "w") as f:
            f.write(text)
        before = len(d.log())
        d.proc.send_signal(signal.SIGHUP)
        wait_for(lambda: len(d.log()) > before, "a word about the reload")
        check(word in d.log()[before:], f"reload of {text!r}: {d.log()[before:]}")
        d.ctl_ok("status")
    program = env.program("tests/integration/limits")
    procs = [env.spawn(program, d.sock, "idle", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(6)]
    for proc in procs:
        equal(proc.stdout.readline().strip(), "holding", "one of six clients where five were allowed at the start")


# ---- systemd's store of descriptors ----

def stored_daemon(env, notify, models, args=(), stored=(), activate=None):
    d = env.daemon(models, args, environ={"NOTIFY_SOCKET": notify.path}, stored=stored, activate=activate)
    notify.wait("READY=1")
    return d


def slab_of(d):
    return outlive.slab_inode(d.worker_pid()) if d.env.backend == "cpu" else None


def test_store_restart(env):
    """systemctl restart, also to another binary: what it has stored is mapped again, no weights are read."""
    path, notify = outlive.checkpoint(env, "stored", "tiny-llama"), Notify(env)
    d = stored_daemon(env, notify, (f"m={path}",))
    first, slab = outlive.result_llama(env, d), slab_of(d)
    notify.kept(3)
    for turn in range(2):
        if turn:
            d.kill()  # the supervisor too: nobody can have said anything to systemd
        else:
            equal(d.stop(), 0, "status")
        notify.kept(3)
        d = stored_daemon(env, notify, (f"m={path}",), stored=notify.store)
        check("m: ready, adopted" in d.log(), d.log())
        equal(slab_of(d), slab, f"the slab after restart {turn + 1}")
        equal(outlive.result_llama(env, d), first, "result")
        size = os.path.getsize(os.path.join(path, "model.safetensors"))
        check(outlive.read_bytes(d.worker_pid()) < size, "the files were read")
    outlive.next_worker(d, d.worker_pid())
    equal(outlive.result_llama(env, d), first, "result of another worker")
    listed = d.json("fds")["fds"]
    equal([(f["part"], f["systemd"], f["domains"]) for f in listed],
          [(part, True, "default") for part in ("manifest", "slab", "tensors")], "exl3ctl fds")
    d.ctl_ok("unload", "m")
    notify.kept(0)


def test_store_follows_the_configuration(env):
    """A model of the configuration that is not in it any more is dropped, one that a client had loaded comes back."""
    notify = Notify(env)
    d = stored_daemon(env, notify, ("layers", "tiny-llama"))
    d.ctl_ok("load", f"late={outlive.checkpoint(env, 'late')}")
    first = outlive.result(env, d, "late")
    notify.kept(9)
    d.stop()
    d = stored_daemon(env, notify, ("tiny-llama",), stored=notify.store)
    equal(sorted(m["name"] for m in d.status()["models"]), ["late", "tiny-llama"], "models")
    equal(d.log().count("ready, adopted"), 2, "adoptions")
    equal(outlive.result(env, d, "late"), first, "result")
    check("layers: stored weights are dropped" in d.log(), d.log())
    notify.kept(6)


def test_store_with_a_socket(env):
    """Both kinds of descriptors at once, as an activated unit gets them."""
    path, notify = env.path("both.sock"), Notify(env)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen(16)
    d = env.daemon(("layers",), sock=path, activate=listening, environ={"NOTIFY_SOCKET": notify.path})
    notify.kept(3)
    d.stop()
    d = env.daemon(("layers",), sock=path, activate=listening, stored=notify.store, environ={"NOTIFY_SOCKET": notify.path})
    check("ready, adopted" in d.log(), d.log())
    d.ctl_ok("status")
    listening.close()


def changed_store(env, change, model="layers", args=()):
    """(daemon that got the changed store, its result, the right result)"""
    notify = Notify(env)
    d = stored_daemon(env, notify, (f"m={env.model(model)}",), args)
    first = outlive.result(env, d)
    notify.kept(3)
    d.stop()
    change(notify)
    stored, notify.store = notify.store, []
    d = stored_daemon(env, notify, (f"m={env.model(model)}",), args, stored=stored)
    notify.kept(3)  # those of the new load
    return d, outlive.result(env, d), first


def test_store_damaged(env):
    """One bit of a weight is another one: found, said, and the files are read."""
    if env.backend != "cpu":
        return

    def change(notify):
        i = notify.find("exl3-slab")
        data = bytearray(os.pread(notify.store[i][1], 1 << 30, 0))
        data[len(data) // 2] ^= 8
        notify.replace(i, bytes(data))
    d, result, first = changed_store(env, change, args=["--adopt", "verify"])
    equal(result, first, "result")
    check("kept weights are not used" in d.log() and "is not what was loaded" in d.log(), d.log())


def test_store_of_another_version(env):
    def change(notify):
        i = notify.find("exl3-manifest")
        data = bytearray(os.pread(notify.store[i][1], 1 << 30, 0))
        data[8:12] = struct.pack("=I", struct.unpack("=I", data[8:12])[0] + 1)
        notify.replace(i, bytes(data))
    d, result, first = changed_store(env, change)
    equal(result, first, "result")
    check("stored weights are dropped: manifest: version" in d.log(), d.log())


def test_store_incomplete(env):
    def change(notify):
        os.close(notify.store.pop(notify.find("exl3-slab" if env.backend == "cpu" else "exl3-tensors"))[1])
    d, result, first = changed_store(env, change)
    equal(result, first, "result")
    check("stored weights are dropped" in d.log(), d.log())


def test_store_of_other_files(env):
    """The checkpoint is another one at the restart: it counts, also where memory cannot hold both, in every domain."""
    path, conf, notify = outlive.checkpoint(env, "other"), env.path("two.conf"), Notify(env)
    with open(conf, "w") as f:
        f.write("[domain other]\nusers = 12345\n")
    args = ["--config", conf]
    d = stored_daemon(env, notify, (f"m={path}",), args)
    notify.kept(3)
    d.stop()
    for turn in range(2):
        outlive.other_weights(path)
        environ = {"NOTIFY_SOCKET": notify.path}
        if turn:
            environ["EXL3_FAULT"] = "weights.slab:1:1"  # the first load of a process finds no memory
        notify.lines = []
        d = env.daemon((f"m={path}",), args, environ=environ, stored=notify.store)
        notify.wait("READY=1")
        s = d.status()["models"][0]
        fresh = env.daemon((f"m={path}",)).status()["models"][0]
        equal(s["fingerprint"], fresh["fingerprint"], "fingerprint")
        check(any(word in d.log() for word in ("was written since", "it had", "is another file")), d.log())
        if env.backend == "cpu" and not turn:
            slabs = {outlive.slab_inode(pid) for pid in outlive.workers(d)}
            equal(len(slabs), 1, "slabs of both domains")
            equal(d.log().count("m: ready, adopted"), 1, "adoptions of what the other one has loaded")
        check("go on" not in d.log(), d.log())
        notify.kept(3)
        d.stop()
