# SPDX-License-Identifier: Apache-2.0
"""SIGHUP, drop-in files, what survives a restart of the worker, and a daemon that does nothing when idle."""
import os
import signal
import time

import exl3ref as ref
from harness import MODELS, check, equal, wait_for

TINY = os.path.join(MODELS, "tiny-llama")
LAYERS = os.path.join(MODELS, "layers")


def write(path, text):
    with open(path, "w") as f:
        f.write(text)


def names(d):
    return {m["name"]: m["state"] for m in d.status()["models"]}


def hup(d, said, times):
    """Reloads and waits for the line that says how it went."""
    os.kill(d.proc.pid, signal.SIGHUP)
    wait_for(lambda: d.log().count(said) == times, f"'{said}' in the log")


def test_reload(env):
    conf = env.path("d.conf")
    os.makedirs(conf + ".d", exist_ok=True)
    write(conf, f"clients-max = 9\nmodel = one={TINY}\n")
    d = env.daemon(args=("--config", conf))
    equal(names(d), {"one": "ready"}, "models at start")

    # A new model in a drop-in is loaded, one that is no longer named stays.
    write(conf, "clients-max = 9\n")
    write(os.path.join(conf + ".d", "50-two.conf"), f"[model two]\npath = {LAYERS}\n")
    hup(d, "configuration read again", 1)
    wait_for(lambda: names(d) == {"one": "ready", "two": "ready"}, "second model")

    # A file with a mistake changes nothing and is named, with its line.
    write(os.path.join(conf + ".d", "60-bad.conf"), "\nclients-max = lots\n")
    hup(d, "nothing was changed", 1)
    check("60-bad.conf:2" in d.log(), f"the log does not name file and line: {d.log()[-500:]}")
    equal(names(d), {"one": "ready", "two": "ready"}, "models after a broken file")

    # What needs a restart is said, what does not counts at once.
    write(os.path.join(conf + ".d", "60-bad.conf"), "queue-depth = 3\narena-max = 1M\n")
    hup(d, "configuration read again", 2)
    check("queue-depth changed" in d.log(), "a key that needs a restart is not named")
    x = env.path("x.npy")
    ref.npy_save(x, "<f4", (1024, 256), [0.5] * (1024 * 256))
    rc, _, err = d.ctl("run", "linear", "two", "k4.mul1", x, "-o", env.path("y.npy"))
    check(rc == 3 and "arena-max" in err, f"the new limit does not count: status {rc}, {err}")

    # Also a worker that is started later has the model that came with the reload.
    os.kill(d.status()["worker_pid"], signal.SIGKILL)
    wait_for(lambda: "generation 2" in d.log(), "second worker")
    equal(names(d), {"one": "ready", "two": "ready"}, "models of the second worker")
    equal(d.stop(), 0, "status after SIGTERM")


def test_supervisor_reloads_too(env):
    """A worker that hangs is killed when the drain-timeout of now is over, not that of the start."""
    conf = env.path("drain.conf")
    write(conf, "drain-timeout = 3600\n")
    d = env.daemon(args=("--config", conf))
    write(conf, "drain-timeout = 0\n")
    hup(d, "configuration read again", 1)
    os.kill(d.worker_pid(), signal.SIGSTOP)
    d.proc.send_signal(signal.SIGTERM)
    equal(d.wait_exit(), 1, "status")
    check("did not drain in time" in d.log(), "the log does not say why")


def replace_worker(d):
    """Kills the worker and waits until another one serves."""
    before = d.worker_pid()
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: d.ctl("status")[0] == 0 and d.worker_pid() != before, "another worker")
    d.wait_ready()


def arena_refused(env, d):
    """Whether an arena of 2 MiB is more than a client may have."""
    rc, _, err = d.ctl("run", "linear", "one", "k4.mul1", env.path("x.npy"), "-o", env.path("y.npy"))
    check(rc in (0, 3) and (rc == 0 or "arena-max" in err), f"status {rc}, {err}")
    return rc == 3


def test_files_count_only_when_asked(env):
    """A new worker has what the daemon has accepted, whatever the files say by then; a key that needs a
    restart waits for one of the daemon."""
    conf = env.path("accepted.conf")
    good = f"arena-max = 64M\nmodel = one={LAYERS}\n"
    ref.npy_save(env.path("x.npy"), "<f4", (1024, 256), [0.5] * (1024 * 256))
    write(conf, good)
    d = env.daemon(args=("--config", conf))

    for text in ("thraeds = 1\n", f"arena-max = 1M\nmodel = two={TINY}\n"):
        write(conf, text)
        replace_worker(d)
        equal(names(d), {"one": "ready"}, f"models of a new worker when the file says {text!r}")
        check(not arena_refused(env, d), f"a new worker has read the file, which says {text!r}")
    os.unlink(conf)
    hup(d, "nothing was changed", 1)
    write(conf, "thraeds = 1\n")
    hup(d, "nothing was changed", 2)
    check("unknown key 'thraeds'" in d.log(), f"the log does not say what is wrong: {d.log()[-500:]}")
    replace_worker(d)
    equal(names(d), {"one": "ready"}, "models after a reload that was refused")
    check(not arena_refused(env, d), "a reload that was refused counts")

    # What is accepted counts for the next worker too, except what needs a restart: backend and device.
    write(conf, f"arena-max = 1M\nthreads = 1\nmemory-max = 1M\nmodel = two={TINY}\n")
    hup(d, "configuration read again", 1)
    wait_for(lambda: names(d) == {"one": "ready", "two": "ready"}, "second model")
    write(conf, "thraeds = 1\n")
    replace_worker(d)
    equal(names(d), {"one": "ready", "two": "ready"}, "models after a reload that was accepted")
    check(arena_refused(env, d), "a new worker does not have the limit of the last reload")
    equal(d.stop(), 0, "status after SIGTERM")


def test_reload_without_a_worker(env):
    """SIGHUP while a worker is about to be started, or does not listen: the next one has the new values."""
    conf = env.path("none.conf")
    ref.npy_save(env.path("x.npy"), "<f4", (1024, 256), [0.5] * (1024 * 256))
    write(conf, f"arena-max = 64M\nmodel = one={LAYERS}\n")
    d = env.daemon(args=("--config", conf))
    check(not arena_refused(env, d), "the limit of the start")
    write(conf, f"arena-max = 1M\nmodel = one={LAYERS}\nmodel = two={TINY}\n")
    before = d.worker_pid()
    os.kill(before, signal.SIGSTOP)
    os.kill(d.proc.pid, signal.SIGHUP)
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: d.ctl("status")[0] == 0 and d.worker_pid() != before, "another worker")
    wait_for(lambda: names(d) == {"one": "ready", "two": "ready"}, "the new model")
    check(arena_refused(env, d), "the new limit does not count")
    equal(d.stop(), 0, "status after SIGTERM")


def test_reload_tries_again(env):
    """A model that was refused is loaded by SIGHUP once its folder is right, and is there after a restart."""
    conf, path = env.path("again.conf"), env.path("late-again")
    write(conf, "")
    d = env.daemon(args=("--config", conf))
    write(conf, f"model = late={path}\n")
    hup(d, "model late: refused", 1)
    equal(names(d), {"late": "failed"}, "before")
    os.symlink(LAYERS, path)
    hup(d, "model late: ready", 1)
    wait_for(lambda: names(d) == {"late": "ready"}, "the model")
    replace_worker(d)
    equal(names(d), {"late": "ready"}, "models of the second worker")


def test_loads_survive_the_worker(env):
    """A new worker has the models of the old one: those of the start and those that clients loaded and left."""
    d = env.daemon((f"one={TINY}",))
    d.ctl_ok("load", f"two={LAYERS}")
    d.ctl_ok("load", f"three={TINY}")
    d.ctl_ok("unload", "three")
    rc, _, _ = d.ctl("load", "broken=/nonexistent")
    equal(rc, 3, "status of a load that is refused")
    os.kill(d.status()["worker_pid"], signal.SIGKILL)
    wait_for(lambda: "generation 2" in d.log(), "second worker")
    equal(names(d), {"one": "ready", "two": "ready"}, "models of the second worker")
    equal(d.stop(), 0, "status after SIGTERM")


def test_a_path_is_no_option(env):
    """A directory whose name looks like an option comes back after a restart like any other."""
    path = env.path("odd,device=7")
    os.symlink(env.model("layers"), path)
    d = env.daemon()
    d.ctl_ok("load", f"layers={path}")
    before = d.worker_pid()
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: d.ctl("status")[0] == 0 and d.worker_pid() != before, "another worker")
    d.wait_ready()
    equal([m["name"] for m in d.status()["models"]], ["layers"], "models after the restart")


def test_idle_means_asleep(env):
    """Without work every thread sleeps, whoever is connected; spinning ends by itself."""
    d = env.daemon((f"layers={LAYERS}",))
    x = env.path("x.npy")
    ref.npy_save(x, "<f4", (1, 256), [0.5] * 256)
    for _ in range(3):
        d.ctl_ok("run", "linear", "layers", "k4.mul1", x, "-o", env.path("y.npy"))
    tasks = f"/proc/{d.status()['worker_pid']}/task"

    def states():
        found = set()
        for tid in os.listdir(tasks):
            with open(f"{tasks}/{tid}/stat") as f:
                found.add(f.read().rpartition(")")[2].split()[0])
        return found

    def asleep():
        """Whenever one looks for a quarter of a second; a beat to the supervisor now and then is no work."""
        for _ in range(50):
            if states() != {"S"}:
                return False
            time.sleep(0.005)
        return True
    wait_for(asleep, "all threads asleep")
    equal(d.stop(), 0, "status after SIGTERM")
