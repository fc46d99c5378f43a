# SPDX-License-Identifier: Apache-2.0
"""MPS control daemons of the fault domains, with a program that stands for nvidia-cuda-mps-control."""
import os
import signal
import stat
import subprocess
import time

from harness import HERE, Skipped, check, equal, wait_for
from test_domains import AS_BATCH, AS_TEAM, BATCH, TEAM_GID, daemon, kill_worker, one_request, status

DEVICE = False


def mps(env, mode="", *args, **kw):
    """A daemon whose control daemons behave as the mode says, which may be changed later."""
    env.mode = env.path(f"fake-{os.urandom(4).hex()}")
    say(env, mode)
    environ = dict(kw.pop("environ", {}), FAKE_MPS=env.mode)
    return env.daemon(kw.pop("models", (f"layers={env.model('layers')}",)),
                      ["--mps-control", os.path.join(HERE, "fake_mps.sh"), *args], environ=environ, **kw)


def say(env, mode):
    with open(env.mode, "w") as f:
        f.write(mode)


def started(env):
    """Process ids of the control daemons, in the order of their starts."""
    try:
        with open(env.mode + ".started") as f:
            return [int(line.split()[0]) for line in f]
    except FileNotFoundError:
        return []


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def texts(d, kind):
    return [e["text"] for e in d.json("events")["events"] if e["kind"] == kind]


def worker_env(d):
    with open(f"/proc/{d.worker_pid()}/environ") as f:
        return dict(v.split("=", 1) for v in f.read().split("\0") if "=" in v)


def test_a_server_for_each_generation(env):
    """Folders, who may enter them, what worker and clients are told; a new one after a death, the old one ends."""
    d = mps(env)
    pipe = status(d)["mps_pipe"]
    check(os.path.exists(pipe + "/control"), f"pipe folder {pipe}")
    equal(worker_env(d)["CUDA_MPS_PIPE_DIRECTORY"], pipe, "the worker's environment")
    equal(stat.S_IMODE(os.stat(pipe).st_mode), 0o711, "mode of the pipe folder")
    equal(stat.S_IMODE(os.stat(os.path.dirname(pipe)).st_mode), 0o711, "mode of the folder above it: not to be listed")
    equal(stat.S_IMODE(os.stat(pipe + "/log").st_mode), 0o700, "mode of the log folder")
    equal(d.ctl_ok("env"), f"export CUDA_MPS_PIPE_DIRECTORY='{pipe}'\n", "exl3ctl env")
    check(pipe in d.ctl_ok("status"), "exl3ctl status does not name the folder")
    # One client stays in the old server.
    open(pipe + "/client1", "w").close()
    first = started(env)
    equal(len(first), 1, "control daemons")
    kill_worker(d)
    wait_for(lambda: d.ctl("status")[0] == 0, "the next worker")
    d.wait_ready()
    second = status(d)["mps_pipe"]
    check(second != pipe and os.path.dirname(second) == os.path.dirname(pipe), f"the next folder: {second}")
    equal(worker_env(d)["CUDA_MPS_PIPE_DIRECTORY"], second, "the next worker's environment")
    wait_for(lambda: os.path.exists(pipe + "/quit"), "the old one to be told to quit")
    time.sleep(0.3)
    check(alive(first[0]), "the old server has ended in spite of its client")
    os.unlink(pipe + "/client1")
    wait_for(lambda: not alive(first[0]) and not os.path.exists(pipe), "the end of the old server and of its folder")
    equal(one_request(env, d)[0], 0, "a request")
    pids = started(env)
    equal(len(pids), 2, "control daemons in all")
    equal(d.stop(), 0, "status after SIGTERM")
    check(not alive(pids[1]), "a control daemon is left")
    check(not os.path.exists(os.path.dirname(pipe)), "folders are left")


def test_domains_have_their_own(env):
    d = daemon(env, "--mps-control", os.path.join(HERE, "fake_mps.sh"), environ={"FAKE_MPS": env.path("fake-two")})
    env.mode = env.path("fake-two")
    ours, theirs = status(d)["mps_pipe"], status(d, **AS_BATCH)["mps_pipe"]
    check(ours and theirs and ours != theirs, f"folders {ours} and {theirs}")
    kill_worker(d, **AS_BATCH)
    wait_for(lambda: d.ctl("status", **AS_BATCH)[0] == 0, "the next worker of batch")
    check(status(d, **AS_BATCH)["mps_pipe"] not in (ours, theirs), "batch has no fresh server")
    equal(status(d)["mps_pipe"], ours, "the other domain's server")
    equal(d.stop(), 0, "status after SIGTERM")
    check(not any(alive(p) for p in started(env)), "a control daemon is left")


def enters(pipe, **who):
    return subprocess.run(["test", "-e", pipe + "/control"], check=False, **who).returncode == 0


def test_who_may_enter(env):
    """The kernel lets a domain's users into its folder, others not, also after SIGHUP; names are no secret."""
    if os.getuid() != 0:
        raise Skipped("needs root, to be several users")
    os.chmod(env.tmp, 0o711)
    conf, env.mode = env.path("who.conf"), env.path("fake-who")

    def write(text):
        with open(conf, "w") as f:
            f.write(text)
    write(f"[domain batch]\nusers = {BATCH}\n[domain team]\nusers = @{TEAM_GID}\n")
    d = env.daemon((), ["--config", conf, "--mps-control", os.path.join(HERE, "fake_mps.sh")], environ={"FAKE_MPS": env.mode})
    who = {"default": dict(AS_BATCH, user=BATCH + 7), "batch": AS_BATCH, "team": AS_TEAM}
    pipes = {name: status(d, **w)["mps_pipe"] for name, w in who.items()}
    equal(len(set(pipes.values()) - {""}), 3, f"folders {pipes}")
    for name, w in who.items():
        for other, pipe in pipes.items():
            equal(enters(pipe, **w), name == other, f"somebody of {name} in the folder of {other}")
    check(enters(pipes["batch"], **dict(AS_BATCH, extra_groups=[TEAM_GID])), "a user of one and a group of another: the user counts")
    check(not enters(pipes["team"], **dict(AS_BATCH, extra_groups=[TEAM_GID])), "a user of one and a group of another, there")
    write(f"[domain batch]\nusers = {BATCH + 7}\n[domain team]\nusers = @{TEAM_GID}\n")
    d.proc.send_signal(signal.SIGHUP)
    wait_for(lambda: enters(pipes["batch"], **who["default"]), "the new user")
    check(not enters(pipes["batch"], **AS_BATCH) and enters(pipes["default"], **AS_BATCH), "the old one")
    equal(d.stop(), 0, "status after SIGTERM")


def test_a_slow_one(env):
    """Clients that come meanwhile wait, the supervisor does not."""
    start = time.monotonic()
    d = mps(env, "slow", wait=False)
    wait_for(lambda: started(env), "its start")
    equal(d.ctl("status")[0], 0, "a client that came before the worker")
    check(time.monotonic() - start > 0.9, "the worker did not wait for its server")
    check(status(d)["mps_pipe"], "no server")
    equal(d.stop(), 0, "status after SIGTERM")


def test_one_that_cannot_be_had(env):
    """auto goes on without, require does not; both say why."""
    for mode, word in (("crash", "ended with status 3"), ("hang", "has not opened its socket")):
        d = mps(env, mode, wait=False)
        if mode == "hang":  # the supervisor does not wait for it
            wait_for(lambda: started(env), "its start")
            equal([v["state"] for v in d.json("domains")["domains"]], ["starting"], "exl3ctl domains meanwhile")
        d.wait_ready()
        equal(status(d)["mps_pipe"], "", f"{mode}: folder")
        equal(d.ctl_ok("env"), "# the daemon has no MPS server here\n", f"{mode}: exl3ctl env")
        check(any(word in t for t in texts(d, "mps")), f"{mode}: events {texts(d, 'mps')}")
        equal(one_request(env, d)[0], 0, f"{mode}: a request")
        kill_worker(d)
        wait_for(lambda d=d: d.ctl("status")[0] == 0, "the next worker")
        equal(len(started(env)), 1, f"{mode}: starts: it is not tried again and again")
        equal(d.stop(), 0, f"{mode}: status after SIGTERM")
        check(not any(alive(p) for p in started(env)), f"{mode}: a control daemon is left")
    for point in ("mps.folder", "mps.fork"):
        d = mps(env, "", environ={"EXL3_FAULT": f"{point}:1"})
        equal(status(d)["mps_pipe"], "", f"{point}: folder")
        equal(started(env), [], f"{point}: control daemons")
        equal(d.stop(), 0, f"{point}: status after SIGTERM")
    d = mps(env, "", environ={"EXL3_FAULT": "mps.fork:2"})  # the one that says quit
    first = started(env)
    kill_worker(d)
    wait_for(lambda: "generation 2" in d.log(), "the next generation")
    wait_for(lambda: not alive(first[0]), "the end of a server that cannot be told to quit")
    equal(d.stop(), 0, "status after SIGTERM")
    d = mps(env, "crash", "--mps", "require", "--restart-limit", "1", wait=False)
    equal(d.wait_exit(), 3, "require: status")
    check("ended with status 3" in d.log(), f"require: the log does not say why: {d.log()}")
    d = env.daemon((), ["--mps", "require", "--mps-control", "/nonexistent/control", "--restart-limit", "0"], wait=False)
    equal(d.wait_exit(), 3, "require without the program: status")
    check("cannot be run" in d.log(), f"require without the program: {d.log()}")


def test_one_that_dies(env):
    """Its clients have lost their contexts, the worker too: the next generation, with a fresh one."""
    d = mps(env, "die", "--restart-limit", "1000")
    first = status(d)
    say(env, "")
    wait_for(lambda: "generation 2" in d.log(), "the next generation")
    d.wait_ready()
    check(status(d)["mps_pipe"] != first["mps_pipe"], "no fresh server")
    check(any("its MPS server is gone" in t for t in texts(d, "died")), f"events: {texts(d, 'died')}")
    equal(one_request(env, d)[0], 0, "a request")
    equal(d.stop(), 0, "status after SIGTERM")


def test_a_worker_that_hangs_in_it(env):
    """A driver may wait for a server for ever: the worker is killed, and the next one is started without."""
    d = mps(env, "", "--hang-timeout", "1", "--restart-limit", "1", environ={"EXL3_FAULT": "worker.start:1"}, wait=False)
    equal(d.wait_exit(), 3, "status: every worker hangs here")
    equal(d.log().count("hangs: its loop has not turned for 4 s"), 2, f"workers that hung in {d.log()}")
    check("going on without MPS" in d.log(), f"the log: {d.log()}")
    equal(len(started(env)), 1, "control daemons")
    check(not any(alive(p) for p in started(env)), "a control daemon is left")


def test_lost_while_idle(env):
    """In an MPS server others may end our context: that is noticed without a request that meets it."""
    d = mps(env, environ={"EXL3_FAULT": "health.lost:2"})
    wait_for(lambda: "generation 2" in d.log(), "the next generation")
    check(any("device 0 is lost" in t for t in texts(d, "died")), f"events: {texts(d, 'died')}")
    equal(one_request(env, d)[0], 0, "a request")
    equal(d.stop(), 0, "status after SIGTERM")


def test_one_that_does_not_end(env):
    """Old ones with clients that stay: only so many; the daemon's end does not wait for them."""
    d = mps(env, "deaf", "--restart-limit", "1000", "--restart-window", "1")
    pipes = []
    for generation in range(1, 7):
        pipes.append(status(d)["mps_pipe"])
        kill_worker(d)
        wait_for(lambda g=generation: f"generation {g + 1}" in d.log(), "the next generation")
        d.wait_ready()
    wait_for(lambda: sum(alive(p) for p in started(env)) == 5, "the oldest to be killed")
    equal([alive(p) for p in started(env)], [False, False, True, True, True, True, True], "control daemons")
    wait_for(lambda: [os.path.exists(p) for p in pipes] == [False, False, True, True, True, True], "their folders")
    equal(d.stop(), 0, "status after SIGTERM")  # with clients that never leave
    wait_for(lambda: not any(alive(p) for p in started(env)), "the end of all control daemons")


def test_supervisor_killed(env):
    """Its control daemons end with it; the next supervisor removes what they left."""
    d = mps(env)
    pipe, sock = status(d)["mps_pipe"], d.sock
    os.kill(d.proc.pid, signal.SIGKILL)
    d.proc.wait()
    wait_for(lambda: not any(alive(p) for p in started(env)), "the end of its control daemon")
    check(os.path.exists(pipe), "nothing is left to be removed")
    d = mps(env, sock=sock)
    check(not os.path.exists(pipe), "the folder of the dead daemon is still there")
    equal(d.stop(), 0, "status after SIGTERM")


def test_off(env):
    """No server, and the environment is left as it is."""
    d = mps(env, "", "--mps", "off", environ={"CUDA_MPS_PIPE_DIRECTORY": "/somewhere"})
    equal(status(d)["mps_pipe"], "", "folder")
    equal(worker_env(d)["CUDA_MPS_PIPE_DIRECTORY"], "/somewhere", "the worker's environment")
    equal(started(env), [], "control daemons")
    equal(d.stop(), 0, "status after SIGTERM")
