# SPDX-License-Identifier: Apache-2.0
"""What systemd sees: readiness, status, stop, sockets that it made."""
import os
import signal
import socket
import subprocess
import time

from harness import WAIT, check, equal, wait_for


class Notify:
    """The other end of $NOTIFY_SOCKET."""

    def __init__(self, env):
        self.path = env.path(f"notify-{os.urandom(4).hex()}")
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(self.path)
        self.sock.settimeout(0.05)
        self.lines = []

    def poll(self):
        try:
            while True:
                self.lines += self.sock.recv(4096).decode().splitlines()
        except OSError:
            return self.lines

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
