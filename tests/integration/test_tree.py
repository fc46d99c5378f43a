# SPDX-License-Identifier: Apache-2.0
"""The tree itself: licences, sizes, which folder may include which, and what the linters say."""
import os
import re
import shutil

from harness import HERE, Skipped, check, equal

DEVICE = False

TOP = os.path.dirname(os.path.dirname(HERE))
CODE = (".c", ".h", ".cu", ".cuh", ".cc", ".py", ".sh", ".bash")
LICENSED = CODE + (".proto", ".map", ".in", ".conf", ".service", ".socket", ".example", ".supp", ".1", ".3", ".5", ".8", "Makefile",
                   ".ci/run")
LINES_MAX = 850

# Includes point one way. Tests and benchmarks may use everything.
MAY_INCLUDE = {
    "shm": {"shm"},
    "proto": {"shm", "proto"},
    "kernels": {"shm", "kernels"},
    "client": {"shm", "proto", "kernels", "client"},
    "daemon": {"shm", "proto", "kernels", "daemon"},
}


def once(env):
    """The tree is the same whatever it is built with."""
    if env.short:
        raise Skipped("done with the plain build")


def ours(endings):
    """(path, text) of every file of ours that ends so; build folders are not ours."""
    for folder, names, files in os.walk(TOP):
        names[:] = [n for n in names if not n.startswith((".git", "build")) and n not in ("__pycache__", "shared")]
        for file in files:
            path = os.path.relpath(os.path.join(folder, file), TOP)
            if path.endswith(endings) and not os.path.islink(os.path.join(TOP, path)):
                with open(os.path.join(TOP, path), errors="replace") as f:
                    yield path, f.read()


def test_every_file_says_its_licence_and_its_job(env):
    seen = 0
    for path, text in ours(LICENSED):
        head = text.split("\n")[:4]
        check(any("SPDX-License-Identifier: Apache-2.0" in line for line in head[:2]), f"{path} does not begin with its licence")
        if path.endswith((".c", ".h", ".cu", ".cuh", ".cc")):
            name = os.path.basename(path)
            check(any(re.search(rf"{re.escape(name)} - \S", line) for line in head),
                  f"{path} does not say in its first comment what it is: {head}")
        seen += 1
    check(seen > 300, f"only {seen} files were found")


def test_no_control_characters(env):
    for path, text in ours(LICENSED + (".md",)):
        odd = re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text)
        check(not odd, f"{path} has the control character {odd and odd[0]!r} in {odd and text[max(0, odd.start() - 30):odd.end()]!r}")


def test_includes_point_one_way(env):
    for path, text in ours((".c", ".h", ".cu", ".cuh")):
        allowed = MAY_INCLUDE.get(path.split("/", maxsplit=1)[0])
        for name in re.findall(r'^\s*#\s*include "([^"]+)"', text, re.M) if allowed else ():
            check("/" in name, f'{path} includes "{name}" without its folder')
            check(name.split("/", maxsplit=1)[0] in allowed, f"{path} includes {name}")


def test_files_are_of_a_size_to_read(env):
    long = [f"{path} ({lines} lines)" for path, text in ours(CODE) if (lines := text.count("\n")) > LINES_MAX]
    equal(long, [], f"files of more than {LINES_MAX} lines")


def test_every_header_has_a_guard_of_its_own(env):
    guards = {}
    for path, text in ours((".h", ".cuh")):
        guard = re.search(r"^#ifndef (\w+)\n#define \1$", text, re.M)
        if guard:
            check(guard[1] not in guards, f"{path} and {guards.get(guard[1])} have the guard {guard[1]}")
            guards[guard[1]] = path
        else:
            check("#pragma once" in text or path.endswith("inst.cuh"), f"{path} has no guard")


def test_shell_scripts_pass_shellcheck(env):
    once(env)
    if not shutil.which("shellcheck"):
        raise Skipped("shellcheck is not installed")
    scripts = [os.path.join(TOP, path) for path, _ in ours((".sh", ".bash", ".ci/run"))]
    rc, out, err = env.run("shellcheck", "--shell=bash", "--severity=warning", *scripts)
    equal(rc, 0, f"shellcheck ({out}{err})")


def test_python_passes_pyflakes(env):
    once(env)
    if not shutil.which("pyflakes3"):
        raise Skipped("pyflakes3 is not installed")
    rc, out, err = env.run("pyflakes3", *[os.path.join(TOP, path) for path, _ in ours((".py",))])
    equal(rc, 0, f"pyflakes3 ({out}{err})")


def test_manual_pages_are_well_formed(env):
    once(env)
    if not shutil.which("man") or not shutil.which("groff"):
        raise Skipped("man or groff is not installed")
    for path, _ in ours((".1", ".3", ".5", ".8")):
        rc, _, err = env.run("man", "--warnings", "-E", "UTF-8", "-l", os.path.join(TOP, path),
                             env=dict(os.environ, LC_ALL="C.UTF-8", MANWIDTH="100"))
        equal((rc, err), (0, ""), f"man {path}")


def test_units_are_well_formed(env):
    """What systemd itself says about the units, with the programs where `make install` puts them."""
    if not shutil.which("systemd-analyze"):
        raise Skipped("systemd-analyze is not installed")
    units = env.path("units")
    os.mkdir(units)
    for path, text in ours((".service", ".socket")):
        # ExecStart must exist: this build's daemon stands for the installed one.
        text = text.replace("@PREFIX@/sbin/exl3-daemon", env.program("exl3-daemon"))
        name = os.path.basename(path).replace("@.", "@0.")
        with open(os.path.join(units, name), "w") as f:
            f.write(text)
        # What a key of the configuration makes the daemon do must be allowed.
        check(path.endswith(".socket") or re.search(r"^RestrictAddressFamilies=.*\bAF_INET\b", text, re.M), f"{path}: metrics-port")
    names = sorted(os.listdir(units))
    equal(names, ["exl3-daemon@0.service", "exl3-daemon@0.socket"], "units")
    rc, out, err = env.run("systemd-analyze", "verify", "--man=no", "--recursive-errors=no",
                           *[os.path.join(units, n) for n in names])
    check(rc == 0 and "exl3-daemon" not in err, f"systemd-analyze verify: status {rc}, {out}{err}")
    rc, out, err = env.run("systemd-analyze", "security", "--offline=yes", "--threshold=21", "--no-pager",
                           os.path.join(units, "exl3-daemon@0.service"))
    check(rc == 0, f"systemd-analyze security: status {rc}, {out[-1500:]}{err}")


def test_user_group_and_folder_are_made(env):
    """sysusers.d and tmpfiles.d, in a root of their own."""
    if not shutil.which("systemd-sysusers") or not shutil.which("systemd-tmpfiles") or os.getuid() != 0:
        raise Skipped("systemd-sysusers and systemd-tmpfiles, as root, are needed")
    root = env.path("root")
    os.makedirs(os.path.join(root, "etc"))
    for tool, file in (("systemd-sysusers", "exl3-daemon.sysusers.conf"), ("systemd-tmpfiles", "exl3-daemon.tmpfiles.conf")):
        rc, out, err = env.run(tool, f"--root={root}", *(["--create"] if "tmpfiles" in tool else []),
                               os.path.join(TOP, "systemd", file))
        equal(rc, 0, f"{tool} ({out}{err})")
    with open(os.path.join(root, "etc", "passwd")) as f:
        user = next(line.split(":") for line in f if line.startswith("exl3-daemon:"))
    with open(os.path.join(root, "etc", "group")) as f:
        groups = {line.split(":")[0]: line.strip().split(":") for line in f}
    check(user[6].strip().endswith("nologin"), f"its shell: {user}")
    check(all("exl3-daemon" in groups[g][3] for g in ("exl3", "render", "video")), f"its groups: {groups}")
    st = os.stat(os.path.join(root, "run", "exl3-daemon"))
    equal((st.st_uid, st.st_gid, st.st_mode & 0o7777), (int(user[2]), int(groups["exl3"][2]), 0o755), "/run/exl3-daemon")
