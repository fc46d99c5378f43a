# SPDX-License-Identifier: Apache-2.0
"""harness.py - daemons, exl3ctl and clients as processes of a test; everything is ended afterwards."""
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
TESTS = os.path.dirname(HERE)
MODELS = os.path.join(TESTS, "models")
BACKEND = "cpu"  # run.py sets it
WAIT = 120.0  # seconds for anything that should happen at once, on a slow machine under a sanitizer


class Failed(Exception):
    """The product did something else than it should."""


class Skipped(Exception):
    """Something is missing here; the text says what."""


def check(condition, text):
    if not condition:
        raise Failed(text)


def equal(got, want, what):
    check(got == want, f"{what}: got {got!r}, expected {want!r}")


def wait_for(condition, what, seconds=WAIT):
    """Polls until condition() is true and returns its value."""
    until = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        check(time.monotonic() < until, f"{what}: not within {seconds:g} s")
        time.sleep(0.02)


class Env:
    """What the scenarios run against, and what they started."""

    def __init__(self, build, backend, short, loops):
        self.build = os.path.abspath(build)
        self.backend, self.short, self.loops = backend, short, loops
        self.tmp = tempfile.mkdtemp(prefix="exl3-it-")
        self.procs, self.daemons = [], []
        self._shared = None
        self._scenario = 0
        self._next_folder()

    def _next_folder(self):
        self._scenario += 1
        os.mkdir(os.path.join(self.tmp, str(self._scenario)))

    def path(self, name):
        """A file of this scenario's own."""
        return os.path.join(self.tmp, str(self._scenario), name)

    def program(self, name):
        path = os.path.join(self.build, name)
        check(os.access(path, os.X_OK), f"{path} is not built")
        return path

    def model(self, name):
        return os.path.join(MODELS, name)

    def daemon(self, models=(), args=(), sock=None, wait=True, **kw):
        d = Daemon(self, models, args, sock, **kw)
        self.daemons.append(d)
        if wait:
            d.wait_ready()
        return d

    def shared(self):
        """One daemon with all models for the scenarios that leave it as it was."""
        if self._shared and self._shared.proc.poll() is not None:
            self._shared = None
        if not self._shared:
            self._shared = Daemon(self, ("tiny-llama", "tiny-deepseek", "layers"))
            self._shared.wait_ready()
        return self._shared

    def spawn(self, *args, **kw):
        kw.setdefault("stdin", subprocess.DEVNULL)
        proc = subprocess.Popen([str(a) for a in args], **kw)
        self.procs.append(proc)
        return proc

    def run(self, *args, timeout=120, **kw):
        """Runs a program to its end: (status, stdout, stderr)."""
        proc = self.spawn(*args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          errors="replace", **kw)
        try:
            out, err = proc.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            proc.kill()
            proc.communicate()
            raise Failed(f"{os.path.basename(str(args[0]))} {' '.join(map(str, args[1:6]))}: "
                         f"not done within {timeout} s") from None
        self.procs.remove(proc)
        return proc.returncode, out, err

    def logs(self):
        """The last words of the daemons that a failed scenario used, and all that a sanitizer has said."""
        daemons = self.daemons + ([self._shared] if self._shared else [])
        out = ""
        for d in daemons:
            lines = d.log().splitlines()
            said = [i for i, line in enumerate(lines) if re.search(r"(ERROR|WARNING): \w+Sanitizer|runtime error:", line)]
            first = min(said[:1] + [len(lines) - 8])
            out += "".join(f"\n    {os.path.basename(d.log_path)}: {line}" for line in lines[max(first, 0):][:80])
        return out

    def end_scenario(self):
        """Ends what a scenario left behind; the shared daemon stays."""
        for proc in self.procs:
            if proc.poll() is None:
                proc.kill()
            proc.wait()
            for pipe in (proc.stdin, proc.stdout, proc.stderr):
                if pipe:
                    pipe.close()
        self.procs = []
        for d in self.daemons:
            d.kill()
        self.daemons = []
        self._next_folder()

    def close(self):
        self.end_scenario()
        if self._shared:
            self._shared.kill()
            self._shared = None
        shutil.rmtree(self.tmp, ignore_errors=True)


class Survivor:
    """tests/integration/survivor: a client that checks every result, goes on when its worker dies, and says so."""

    def __init__(self, env, sock, *args, **who):
        self.args, self.backs, self.last = args, 0, ""
        self.proc = env.spawn(env.program("tests/integration/survivor"), sock, *args, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **who)
        line = self.proc.stdout.readline().strip()
        check(line == "ready", f"survivor {args}: {line}{'' if line else self.proc.stderr.read()}")
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        """Each of its threads says "back" whenever it is served again."""
        for line in self.proc.stdout:
            self.backs += line == "back\n"
            self.last = line

    def asleep(self):
        """Nothing in it runs."""
        tasks = f"/proc/{self.proc.pid}/task"
        for tid in os.listdir(tasks):
            with open(f"{tasks}/{tid}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] != "S":
                    return False
        return True

    def end(self):
        """What it has counted; no result was wrong and no request lost."""
        self.proc.stdin.close()
        try:
            rc = self.proc.wait(2 * WAIT)
        except subprocess.TimeoutExpired:
            raise Failed(f"survivor {self.args} does not end") from None
        self.reader.join()
        equal(rc, 0, f"survivor {self.args} ({self.last.strip()} {self.proc.stderr.read().strip()})")
        return json.loads(self.last)


def kill_under(pid, survivors):
    """Ends a worker while each thread of the survivors waits for it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        def all_wait():
            for _ in range(5):
                if not all(s.asleep() for s in survivors):
                    return False
                time.sleep(0.02)
            return True
        wait_for(all_wait, "survivors that wait for their worker")
    finally:
        os.kill(pid, signal.SIGKILL)


class Daemon:
    """A supervisor with its worker, in a session of their own."""

    count = 0

    def __init__(self, env, models=(), args=(), sock=None, nofile=None, environ=None, activate=None, stored=()):
        """nofile: how many descriptors each of its processes may have; activate: a listening socket, given to it
        as systemd does; stored: (name, descriptor) of systemd's store, given likewise."""
        Daemon.count += 1
        self.env = env
        self.sock = sock or env.path(f"{Daemon.count}.sock")
        self.log_path = env.path(f"daemon-{Daemon.count}.log")
        command = [env.program("exl3-daemon"), "--socket", self.sock, "--backend", env.backend]
        for m in models:
            command += ["--model", m if "=" in m else f"{m}={env.model(m)}"]
        command += args
        if env.backend == "cuda" and not any(str(a).startswith("--mps") for a in args):
            command += ["--mps", "off"]  # where it is not what is tested, its start and end only take time

        def in_child():
            if nofile:
                resource.setrlimit(resource.RLIMIT_NOFILE, (nofile, nofile))
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for _, fd in passed]
            for i, fd in enumerate(high):
                os.dup2(fd, 3 + i)
        passed = ([("connection", activate.fileno())] if activate else []) + list(stored)
        environ = dict(os.environ, **(environ or {}))
        if passed:
            environ["LISTEN_FDS"] = str(len(passed))
            environ["LISTEN_FDNAMES"] = ":".join(name for name, _ in passed)
            command = ["sh", "-c", 'LISTEN_PID=$$ exec "$@"', "sh"] + command
        with open(self.log_path, "wb") as log:
            self.proc = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ,
                                         start_new_session=True, preexec_fn=in_child, pass_fds=range(3, 3 + len(passed)))

    def log(self):
        with open(self.log_path, errors="replace") as f:
            return f.read()

    def ctl(self, *args, timeout=120, **kw):
        return self.env.run(self.env.program("exl3ctl"), "--socket", self.sock, *args, timeout=timeout, **kw)

    def ctl_ok(self, *args, **kw):
        rc, out, err = self.ctl(*args, **kw)
        check(rc == 0, f"exl3ctl {' '.join(map(str, args))}: status {rc}, {err.strip() or out.strip()}")
        return out

    def json(self, *args):
        return json.loads(self.ctl_ok(*args, "--json"))

    def status(self):
        return self.json("status")

    def wait_ready(self):
        """Until every model is loaded."""
        def ready():
            check(self.proc.poll() is None,
                  f"the daemon ended with status {self.proc.returncode}: {self.log()[-2000:]}")
            rc, out, _ = self.ctl("status", "--json")
            if rc:
                return False
            states = [m["state"] for m in json.loads(out)["models"]]
            check("failed" not in states, f"a model was refused: {out}")
            return all(s == "ready" for s in states)
        wait_for(ready, "daemon with all models loaded")

    def wait_exit(self, seconds=WAIT):
        try:
            return self.proc.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"the daemon did not end within {seconds:g} s: {self.log()[-1000:]}") from None

    def stop(self):
        self.proc.send_signal(signal.SIGTERM)
        return self.wait_exit()

    def kill(self):
        """Ends supervisor and workers at once; only ever our own children."""
        try:
            os.killpg(self.proc.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.proc.wait()

    def worker_pid(self):
        return self.status()["worker_pid"]

    # ---- what it holds ----

    def fds(self, pid=None):
        """Open descriptors by kind, without the numbers that differ from one to the next."""
        pid = pid or self.worker_pid()
        kinds = {}
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
            except FileNotFoundError:
                continue
            kind = target.split(":")[0] if target.startswith(("socket:", "pipe:")) else target
            kinds[kind] = kinds.get(kind, 0) + 1
        return kinds

    def maps(self, pid=None):
        """Shared memory that it has mapped: weights, arenas, rings."""
        with open(f"/proc/{pid or self.worker_pid()}/maps") as f:
            return sum(1 for line in f if "/memfd:" in line)

    def rss_kib(self, pid=None):
        with open(f"/proc/{pid or self.worker_pid()}/status") as f:
            for line in f:
                if line.startswith("VmRSS:"):
                    return int(line.split()[1])
        raise Failed("no VmRSS")

    def connections(self):
        """Connected sockets of its side, whichever of its processes has them."""
        with open("/proc/net/unix") as f:
            fields = [line.split() for line in f]
        return sum(len(v) == 8 and v[7] == self.sock and not int(v[3], 16) & 0x10000 for v in fields)

    def held(self):
        """Everything that must be the same before and after a client."""
        s = self.status()
        pid = s["worker_pid"]
        # The connection that was asked over is closed a moment later. (There may be some of another domain.)
        until = time.monotonic() + 1
        while self.connections() >= s["clients"] and time.monotonic() < until:
            time.sleep(0.005)
        return {"fds": self.fds(pid), "maps": self.maps(pid), "supervisor": self.fds(self.proc.pid),
                "clients": s["clients"], "channels": s["channels"], "arena_bytes": s["arena_bytes"]}

    def settled(self):
        """held(), once all that earlier clients had has come back."""
        until = time.monotonic() + WAIT
        while True:
            first = self.held()
            time.sleep(0.05)
            if first == self.held() and (first["clients"], first["channels"], first["arena_bytes"]) == (1, 0, 0):
                return first
            check(time.monotonic() < until, f"something of earlier clients is still there: {first}\n{self.ctl_ok('ps')}")

    def wait_held(self, before, what):
        """The daemon may need a moment to notice that a client has gone."""
        until = time.monotonic() + WAIT
        while True:
            now = self.held()
            if now == before:
                return
            if time.monotonic() > until:
                differ = {k: (before[k], now[k]) for k in before if before[k] != now[k]}
                raise Failed(f"{what}: still held (before, after): {differ}")
            time.sleep(0.05)

    def listening(self):
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            s.connect(self.sock)
            return True
        except OSError:
            return False
        finally:
            s.close()
