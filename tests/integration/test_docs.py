# SPDX-License-Identifier: Apache-2.0
"""Documents against the programs: a page that has gone stale fails here."""
import glob
import os
import re
import socket
import sys

from harness import HERE, check, equal

DEVICE = False

TOP = os.path.dirname(os.path.dirname(HERE))


def read(path):
    with open(os.path.join(TOP, path), errors="replace") as f:
        return f.read()


def test_readme_shows_the_first_client(env):
    """The listing in README.md is the file that is compiled, from its main() on."""
    source = read("client/examples/first.c").split("int main", 1)[1]
    check("int main" + source.rstrip() in read("README.md"), "README.md and client/examples/first.c differ")


def test_every_key_is_in_the_manual(env):
    rc, out, _ = env.run(env.program("exl3-daemon"), "--help")
    equal(rc, 0, "--help")
    page = read("client/man/exl3-daemon.conf.5").replace("\\-", "-")
    keys = re.findall(r"^  --([a-z-]+) ", out, re.M)
    check(len(keys) > 15, f"keys: {keys}")
    for key in keys:
        check(re.search(rf"^\.BR? (.*[ \"])?{key}\b", page, re.M), f"exl3-daemon.conf.5 does not describe {key}")


def test_defaults_in_the_manual(env):
    rc, out, err = env.run(env.program("exl3-daemon"), "--help")
    equal(rc, 0, f"--help ({err})")
    page = read("client/man/exl3-daemon.conf.5").replace("\\-", "-")
    for key, default in re.findall(r"^  --([a-z-]+) .*\[([^\]\s]*)\](?: \(|$)", out, re.M):
        line = re.search(rf"^\.BR? .*\b{key} .*$", page, re.M)
        check(line and f"({default})" in line.group(0), f"exl3-daemon.conf.5: {key} is not given as ({default})")


def test_reload_and_units_in_the_manual(env):
    """A key that SIGHUP takes over has its *, one that counts something says what."""
    rc, out, err = env.run(env.program("exl3-daemon"), "--help")
    equal(rc, 0, f"--help ({err})")
    page = read("client/man/exl3-daemon.conf.5").replace("\\-", "-").split(".SH MODEL SECTIONS")[0]
    seen = 0
    for key, kind, star in re.findall(r"^  --([a-z-]+) (\S+) +(\*?) ", out, re.M):
        entry = re.search(rf"^\.BR? (?:.*[ \"])?{key}(?![\w-]).*\n(?:(?!\.TP).*\n)*", page, re.M)
        check(entry, f"exl3-daemon.conf.5 does not describe {key}")
        first = entry.group(0).split("\n")[0]
        equal("*" in first, star == "*", f"exl3-daemon.conf.5: {key} with a *")
        words = {"BYTES": "bytes", "N": "second|microsecond|threads|channels|clients|restarts|requests|launches|port|node|of them"}
        check(kind not in words or re.search(words[kind], entry.group(0)), f"exl3-daemon.conf.5: what does {key} count? {entry.group(0)}")
        seen += star == "*"
    check(seen > 10, f"only {seen} keys with a *")


def test_example_has_the_defaults(env):
    """What the example sets is what counts without it, and all that it has in comments is accepted."""
    program, example = env.program("exl3-daemon"), os.path.join(TOP, "systemd", "exl3-daemon.conf.example")
    rc, plain, err = env.run(program, "--config", "/dev/null", "--check-config")
    equal(rc, 0, f"defaults ({err})")
    equal(env.run(program, "--config", example, "--check-config"), (0, plain, ""), "the example as it is")
    with open(example) as f:
        text = f.read().replace("batch, @nightly", "1, @2").replace("users = batch 2000-2999", "users = 3 2000-2999")
    whole = env.path("whole.conf")
    with open(whole, "w") as f:
        f.write(re.sub(r"^#(?=\S)", "", text, flags=re.M).replace("/var/lib/exl3/tiny-llama", env.model("tiny-llama")))
    rc, out, err = env.run(program, "--config", whole, "--check-config")
    equal((rc, err), (0, ""), "the example with what it has in comments")
    for line in ("tenant = batch:weight=20", "domain = batch=1, @2", "device=cuda:1"):
        check(line in out, f"{line} is not in what counts: {out}")


def test_every_metric_is_in_the_table(env):
    """docs/metrics.md against a scrape: the same names, types and labels."""
    d = env.daemon((f"layers={env.model('layers')}",), ("--tenant", "a:users=4242"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.connect(d.sock + ".metrics")
        s.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = b"".join(iter(lambda: s.recv(65536), b"")).decode()
    served = dict(re.findall(r"^# TYPE (exl3_\w+) (\w+)$", text, re.M))
    table = {m[0]: (m[1], m[2]) for m in re.findall(r"^\| `(exl3_\w+)` \| (\w+) \| ([^|]*) \|", read("docs/metrics.md"), re.M)}
    equal(sorted(table), sorted(served), "metrics in docs/metrics.md")
    for name, kind in served.items():
        equal(table[name][0], kind, f"docs/metrics.md: type of {name}")
        documented = set(re.findall(r"`(\w+)`", table[name][1]))
        labels = set()
        for line in re.findall(rf"^{name}(?:_bucket|_sum|_count)?\{{([^}}]*)\}}", text, re.M):
            labels |= set(re.findall(r"(\w+)=", line)) - {"le"}
        check(labels <= documented, f"docs/metrics.md: {name} has the labels {labels}, documented are {documented}")


def test_messages_of_the_troubleshooting_table(env):
    """Every message in docs/troubleshooting.md is one that the code has."""
    code = ""
    for folder in ("client", "daemon", "shm", "kernels"):
        for path in glob.glob(os.path.join(TOP, folder, "*.[ch]")):
            with open(path, errors="replace") as f:
                code += f.read()
    code = re.sub(r'"\s*\n\s*"', "", code)  # strings over several lines
    messages = [m for row in re.findall(r"^\| (`.*?`) \|", read("docs/troubleshooting.md"), re.M) for m in re.findall(r"`([^`]+)`", row)]
    check(len(messages) > 30, f"messages: {len(messages)}")
    for message in messages:
        for part in (p.strip() for p in message.split("…")):
            check(len(part) < 4 or part in code, f"docs/troubleshooting.md: no code says '{part}' (of '{message}')")


def test_every_verb_is_in_the_manual(env):
    rc, out, _ = env.run(env.program("exl3ctl"), "--help")
    equal(rc, 0, "--help")
    page = read("client/man/exl3ctl.1").replace("\\-", "-")
    verbs = re.findall(r"^  ([a-z]+) ", out, re.M)
    check(len(verbs) >= 10, f"verbs: {verbs}")
    for verb in verbs:
        check(re.search(rf"^\.B[IR]? \"?{verb}\b", page, re.M), f"exl3ctl.1 does not describe {verb}")
    for verb in verbs:
        rc, out, _ = env.run(env.program("exl3ctl"), "help", verb)
        for option in re.findall(r"^  --([a-z0-9-]+)", out, re.M):
            check(f"--{option}" in page, f"exl3ctl.1 does not mention --{option} of {verb}")


def test_every_function_is_in_the_manual(env):
    page, exported = read("client/man/exl3.3"), re.findall(r"^\t(exl3_\w+);", read("client/libexl3.map"), re.M)
    check(len(exported) > 30, f"exported: {exported}")
    gpu = re.findall(r"^EXL3_GPU_API [^;(]*?\b(exl3_gpu_\w+)\(", read("client/cuda/exl3_gpu.h"), re.M)
    check(len(gpu) > 5, f"of libexl3-gpu: {gpu}")
    for name in exported + gpu:
        check(re.search(rf"\b{name} \(\)", page), f"exl3.3 does not mention {name}")


def test_every_file_that_is_named_exists(env):
    for path in ["README.md"] + sorted(os.path.relpath(p, TOP) for p in glob.glob(os.path.join(TOP, "docs", "*.md"))):
        text, here = read(path), os.path.dirname(os.path.join(TOP, path))
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            check(os.path.exists(os.path.join(here, target)), f"{path}: {target} does not exist")
        for name in re.findall(r"`((?:shm|proto|client|kernels|daemon|tests|bench|systemd|docs)/[\w./*@-]*)`", text):
            check(glob.glob(os.path.join(TOP, name)), f"{path}: {name} does not exist")


def test_limits_and_details_are_named_as_in_the_code(env):
    """Names in capitals that a document uses are in a header."""
    headers = "".join(read(p) for p in ("shm/exl3_abi.h", "client/exl3.h", "shm/ring.h", "kernels/format.h", "proto/exl3.proto"))
    for path in ("README.md", "docs/protocol.md", "docs/numerics.md", "docs/operations.md", "docs/architecture.md"):
        for name in re.findall(r"\bEXL3_[A-Z0-9_]+\b", read(path)):
            check(name in headers or name in ("EXL3_SOCKET", "EXL3_BACKEND_DIR", "EXL3_LIBRARY"), f"{path}: {name} is in no header")


def test_figures_are_those_of_the_csv_files(env):
    rc, out, err = env.run(sys.executable, os.path.join(TOP, "docs", "report.py"), "--check")
    equal(rc, 0, f"docs/report.py --check ({out.strip()}{err.strip()})")
