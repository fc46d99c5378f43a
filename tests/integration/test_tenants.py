# SPDX-License-Identifier: Apache-2.0
"""Tenants: whose a client is by what the kernel says, what each limit's refusal says, and a policy that is reloaded."""
import os
import re
import signal
import subprocess
import time

from harness import WAIT, Failed, Skipped, check, equal, wait_for

BATCH = 12345  # any number: no name is needed
AS_BATCH = {"user": BATCH, "group": 0, "extra_groups": []}
MODULE = "model.layers.0.mlp.down_proj"
READY = ("model:tiny-llama", f"module:{MODULE}", "arena:8388608", "channel:64")


def need_root(env):
    if os.getuid() != 0:
        raise Skipped("needs root, to be several users")
    os.chmod(env.tmp, 0o711)


def say(env, d, *steps, timeout=120, **who):
    """What the client was told: [(step, code, sentence)]."""
    rc, out, err = env.run(env.program("tests/integration/tenants"), d.sock, *steps, timeout=timeout, **who)
    check(rc == 0, f"tenants {' '.join(steps)}: {err.strip()}")
    return [(line.split(" ", 2)[0], int(line.split(" ", 2)[1]), line.split(" ", 2)[2])
            for line in out.splitlines() if line != "holding"]


class Held:
    """A client that stays: goes on with go(), ends at the end of the scenario at the latest."""

    def __init__(self, env, d, *steps, **who):
        self.proc = env.spawn(env.program("tests/integration/tenants"), d.sock, *steps, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **who)
        self.wait_hold()

    def wait_hold(self):
        lines = []
        while True:
            line = self.proc.stdout.readline()
            if not line:
                raise Failed(f"tenants: {lines} {self.proc.stderr.read().strip()}")
            if line.strip() == "holding":
                return lines
            lines.append(line.strip())

    def go(self):
        self.proc.stdin.write("\n")
        self.proc.stdin.flush()

    def end(self):
        out, _ = self.proc.communicate("\n", timeout=WAIT)
        return out.splitlines()


def refused(told, code, sentence, what):
    step = told[-1]
    check(step[1] == code and re.fullmatch(sentence, step[2]), f"{what}: {step}, expected {code} {sentence!r}")


def write(path, text):
    with open(path, "w") as f:
        f.write(text)


def hup(d, text):
    """SIGHUP, and until the worker has taken it."""
    before = d.log().count(text)
    d.proc.send_signal(signal.SIGHUP)
    wait_for(lambda: d.log().count(text) > before, f"'{text}' in the log")


def tenant(env, *lines, models=("tiny-llama",)):
    """A daemon whose only other tenant, batch, has all users that are not root."""
    conf = env.path(f"tenants-{time.monotonic_ns()}.conf")
    write(conf, "[tenant batch]\nusers = 1-4294967295\n" + "".join(f"{line}\n" for line in lines))
    return env.daemon(models, ["--config", conf]), conf


def test_registered_bytes(env):
    """Arenas and rings of all clients of a tenant count, also after their client has left, until they are gone."""
    need_root(env)
    d, _ = tenant(env, "bytes = 1M")
    told = say(env, d, "hello", "arena:1048577", **AS_BATCH)
    refused(told, -122, r"arena of 1052672 bytes refused: tenant batch may register 1048576 bytes \(bytes\), holds 0", "too large")
    other = Held(env, d, "hello", "arena:524288", "hold", **AS_BATCH)
    told = say(env, d, "hello", "arena:524289", **AS_BATCH)
    refused(told, -122, r"arena of 528384 bytes .* holds 524288", "beside another client")
    told = say(env, d, "hello", "arena:524288", "channel:64", **AS_BATCH)
    equal(told[1][1], 0, "what is left")
    refused(told, -122, r"channel of \d+ bytes refused: tenant batch may register 1048576 bytes \(bytes\), holds 1048576", "a ring")
    told = say(env, d, "hello", "arena:524288", "free", "arena:524288", **AS_BATCH)
    equal([t[1] for t in told], [0, 0, 0, 0], "given back")
    other.end()
    wait_for(lambda: say(env, d, "hello", "arena:1048576", **AS_BATCH)[1][1] == 0, "all of it")
    equal(say(env, d, "hello", "arena:16777216")[1][1], 0, "root is of the default tenant")
    equal(d.stop(), 0, "status after SIGTERM")


def test_clients_and_channels(env):
    need_root(env)
    d, _ = tenant(env, "clients = 2", "channels = 3")
    held = [Held(env, d, "hello", "channel:8", "channel:8", "hold", **AS_BATCH), Held(env, d, "hello", "hold", **AS_BATCH)]
    refused(say(env, d, "hello", **AS_BATCH), -122, r"client refused: tenant batch may have 2 clients \(clients\), has 2", "a third client")
    equal(say(env, d, "hello")[0][1], 0, "another tenant")
    held[1].end()
    wait_for(lambda: say(env, d, "hello", **AS_BATCH)[0][1] == 0, "room for another")
    told = say(env, d, "hello", "channel:8", "channel:8", **AS_BATCH)
    refused(told, -122, r"channel refused: tenant batch may have 3 channels \(channels\), has 3", "channels of all its clients")
    told = say(env, d, "hello", "channel:8", "close", "channel:8", **AS_BATCH)
    equal([t[1] for t in told], [0, 0, 0, 0], "closed and made again")
    held[0].end()
    equal(d.stop(), 0, "status after SIGTERM")


def test_one_user_cannot_take_all_places(env):
    need_root(env)
    d = env.daemon(args=("--clients-max", "8"))
    held = [Held(env, d, "hello", "hold", **AS_BATCH) for _ in range(7)]
    refused(say(env, d, "hello", **AS_BATCH), -122,
            rf"client refused: one user may have 7 clients \(clients-per-user\), uid {BATCH} has 7", "the eighth")
    equal(say(env, d, "hello", user=BATCH + 1, group=0)[0][1], 0, "another user")
    for h in held:
        h.end()
    d.stop()


def test_who_may_connect_and_what(env):
    """connect, models and admin; root may always look and administer."""
    need_root(env)
    d, conf = tenant(env, "models = tiny-*", models=("tiny-llama", "layers"))
    told = say(env, d, "hello", "model:tiny-llama", "model:layers", **AS_BATCH)
    equal(told[1][1], 0, "a model that it may use")
    refused(told, -1, r"model 'layers' refused: tenant batch may use tiny-\* \(models\)", "one that it may not")
    equal([m["name"] for m in d.json("models")["models"]], ["tiny-llama", "layers"], "what root sees")
    _, out, _ = d.ctl("models", "--json", **AS_BATCH)
    check("tiny-llama" in out and "layers" not in out, f"what batch sees: {out}")
    refused(say(env, d, "hello", "unload:layers", **AS_BATCH), -1, r"unload: only root, .* admin = yes may do that, not batch", "administration")
    write(conf, "[tenant batch]\nusers = 1-99999\nadmin = yes\n")
    hup(d, "configuration read again")
    equal(say(env, d, "hello", "unload:layers", **AS_BATCH)[1][1], 0, "an administrator by policy")
    write(conf, "[tenant batch]\nusers = 1-99999\nconnect = no\n")
    hup(d, "configuration read again")
    refused(say(env, d, "hello", **AS_BATCH), -1, rf"client refused: uid {BATCH} is of tenant batch, which may not connect \(connect\)", "connect")
    equal(say(env, d, "hello")[0][1], 0, "root")
    rc, _, err = d.ctl("status", **AS_BATCH)
    check(rc == 3 and "may not connect" in err, f"exl3ctl: status {rc}, {err}")
    equal(d.stop(), 0, "status after SIGTERM")


def test_groups_of_a_client(env):
    """Its group and its supplementary groups count, and the order of the sections."""
    need_root(env)
    d = env.daemon(args=("--tenant", "first:groups=23456", "--tenant", "first:channels=1", "--tenant", f"second:users={BATCH}",
                         "--tenant", "second:channels=2"))
    opened = {}
    for what, who in {"user": AS_BATCH, "supplementary": dict(AS_BATCH, extra_groups=[23455, 23456]),
                      "neither": {"user": BATCH + 1, "group": 0, "extra_groups": [23455]}}.items():
        opened[what] = sum(code == 0 for _, code, _ in say(env, d, "hello", *["channel:8"] * 3, **who)) - 1
    equal(opened, {"user": 2, "supplementary": 1, "neither": 3}, "channels")
    d.stop()


def test_cgroup_of_a_client(env):
    """A pattern of cgroups matches by where the process is, not by what it says."""
    with open("/proc/self/cgroup") as f:
        here = [line.strip()[3:] for line in f if line.startswith("0::/")]
    if not here or re.search(r"[][*?\\ ,]", here[0]):
        raise Skipped("no cgroup v2, or one whose name is a pattern")
    d = env.daemon(args=("--tenant", f"other:cgroups={here[0]}/below", "--tenant", f"job:cgroups=/elsewhere/* {here[0]}",
                         "--tenant", "job:channels=1"))
    refused(say(env, d, "hello", "channel:8", "channel:8"), -122, r"channel refused: tenant job may have 1 channels .*", f"in {here[0]}")
    d.stop()


def test_requests_per_second(env):
    """Requests beyond the rate wait in the ring and are not refused; others are not delayed."""
    need_root(env)
    d, conf = tenant(env, "requests-per-second = 100", "burst = 10")

    def answered():
        return {t["name"]: t["requests"] for t in d.json("tenants")["tenants"]}
    start = time.monotonic()
    told = say(env, d, "hello", *READY, "linear:1:60", **AS_BATCH)
    took = time.monotonic() - start
    equal(told[-1][1:2], (0,), f"codes of delayed requests ({told[-1]})")
    check(took > 0.45, f"60 requests, 10 at once and 100 a second: {took:.2f} s")
    # From now on all that these have would take four minutes, longer than anybody waits here.
    write(conf, "[tenant batch]\nusers = 1-99999\nrequests-per-second = 1\nburst = 1\n")
    hup(d, "configuration read again")
    waiting = [Held(env, d, "hello", *READY, "submit:1:64", "hold", "wait", **AS_BATCH) for _ in range(4)]
    told = say(env, d, "hello", *READY, "linear:1:64")
    equal(told[-1][1], 0, "another tenant beside one that waits")
    now = answered()
    check(now["batch"] < 60 + 4 * 64 and now["default"] == 64, f"they wait, the other one does not: {now}")
    # The limit is lifted: what waits goes on at once, and the clients were never disconnected.
    write(conf, "[tenant batch]\nusers = 1-99999\n")
    hup(d, "configuration read again")
    for c in waiting:
        c.go()
        check(any(line.startswith("wait 0 0 failed") for line in c.end()), "requests that waited when the limit was lifted")
    equal(answered()["batch"], 60 + 4 * 64, "requests of batch")
    equal(d.stop(), 0, "status after SIGTERM")


def test_rows_in_flight(env):
    """A request that does not fit yet waits, one that can never fit is refused."""
    need_root(env)
    d, conf = tenant(env, "rows = 40")
    told = say(env, d, "hello", *READY, "linear:41:1", "linear:40:3", "linear:7:50", "linear:8193:1", **AS_BATCH)
    check(told[-4][1] == -122 and "detail 13" in told[-4][2], f"41 rows: {told[-4]}")
    equal(told[-3][1], 0, "40 rows, three times")
    equal(told[-2][1], 0, "7 rows, fifty times")
    equal(told[-1][1], -22, "an illegal number of rows is that, not a limit")
    clients = [Held(env, d, "hello", *READY, "hold", "linear:33:40", "hold", **AS_BATCH) for _ in range(3)]
    for c in clients:
        c.go()
    for c in clients:
        check(any(" 0 0 failed" in line for line in c.wait_hold()), "several clients at the limit")
        c.end()
    # Lowered below what waits: then it can never run.
    write(conf, "[tenant batch]\nusers = 1-99999\nrows = 8\n")
    hup(d, "configuration read again")
    told = say(env, d, "hello", *READY, "linear:9:1", "linear:8:9", **AS_BATCH)
    equal([t[1] for t in told[-2:]], [-122, 0], "the new limit")
    equal(d.stop(), 0, "status after SIGTERM")


def test_reload_moves_clients(env):
    """A reload drops nobody: clients, and all that they hold, count against the tenant that they belong to now."""
    need_root(env)
    d, conf = tenant(env, "bytes = 32M")
    c = Held(env, d, "hello", *READY, "linear:5:20", "hold", "linear:5:20", "arena:4096", "hold", **AS_BATCH)
    write(conf, f"[tenant new]\nusers = {BATCH}\nbytes = 8M\nclients = 1\n[tenant batch]\nusers = 1-99999\n")
    hup(d, "is of tenant new now")
    c.go()
    lines = c.wait_hold()
    check(any(line.startswith("linear:5:20 0 0 failed") for line in lines), f"requests after the reload: {lines}")
    check(any("arena of 4096 bytes refused: tenant new may register 8388608 bytes (bytes), holds" in line for line in lines),
          f"a lower limit than what is held: {lines}")
    refused(say(env, d, "hello", **AS_BATCH), -122, r"client refused: tenant new may have 1 clients \(clients\), has 1", "it counts there")
    equal(say(env, d, "hello", "arena:31457280", user=BATCH + 1, group=0)[1][1], 0, "and no longer here")
    # A mistake changes nothing.
    write(conf, "[tenant new]\nusers = no-such-user-here\n")
    hup(d, "nothing was changed")
    refused(say(env, d, "hello", **AS_BATCH), -122, r"client refused: tenant new .*", "after a mistake")
    c.end()
    equal(d.stop(), 0, "status after SIGTERM")


def test_lost_rights(env):
    """Who may no longer connect, or use a model that is open, is told why and disconnected."""
    need_root(env)
    d, conf = tenant(env, "models = *", models=("tiny-llama", "layers"))
    c = Held(env, d, "hello", *READY, "hold", "channel:8", "hold", **AS_BATCH)
    other = Held(env, d, "hello", "model:layers", "hold", "channel:8", "hold", **AS_BATCH)
    write(conf, "[tenant batch]\nusers = 1-99999\nmodels = layers\n")
    hup(d, "configuration read again")
    c.go()
    equal(c.end()[-1], "channel:8 -1 farewell: model 'tiny-llama' refused: tenant batch may use layers (models)", "whose model is no longer allowed")
    other.go()
    check("channel:8 0" in other.wait_hold(), "whose model still is")
    other.proc.stdin.close()
    write(conf, "[tenant batch]\nusers = 1-99999\nconnect = no\n")
    last = Held(env, d, "hello", "hold", "channel:8", "hold", **AS_BATCH)
    hup(d, "configuration read again")
    last.go()
    check(re.fullmatch(r"channel:8 -1 farewell: client refused: .* may not connect \(connect\)", last.end()[-1]), "who may not connect any more")
    refused(say(env, d, "hello", **AS_BATCH), -1, r"client refused: .* may not connect \(connect\)", "the next hello")
    check("which may not connect" in d.log(), "the log says why")
    equal(d.stop(), 0, "status after SIGTERM")


def test_refused_clients_keep_nobody_out(env):
    """Those that may not connect take no places, however many they are."""
    need_root(env)
    d, _ = tenant(env, "connect = no")
    import socket
    socks = []
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(BATCH, BATCH, BATCH)
            for _ in range(400):
                s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                s.connect(d.sock)
                socks.append(s)
            signal.pause()
        finally:
            os._exit(0)
    try:
        for _ in range(20):
            equal(say(env, d, "hello", "channel:8")[1][1], 0, "somebody else")
            time.sleep(0.02)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    equal(d.stop(), 0, "status after SIGTERM")
