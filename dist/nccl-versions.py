#!/usr/bin/env python3
"""Compares the plugin interfaces of each NCCL on PyPI with this library's.

Reads the wheels of nvidia-nccl-cu12 and nvidia-nccl-cu13 for x86-64 and aarch64, from 2.27 to the
newest, and prints a table in Markdown. NCCL finds a plugin by the name of the plugin's symbol
(ncclNetPlugin_v11, ncclTunerPlugin_v5, ...), so NCCL's library contains these names as text. The
two architectures of a version must agree.

Exit status 1: an NCCL version looks for no net interface that this library has, or looks first for
a newer net or tuner interface than this library has. Exit status 2: wrong arguments, or a wheel
could not be read. Downloads some hundred MB a wheel with pip, one at a time, and keeps none of
them.

    python3 dist/nccl-versions.py [--min VERSION] [--package NAME]...
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from datetime import date
from pathlib import Path

PACKAGES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
# pip compares platform names exactly, and takes the first name in the list that a wheel has.
GLIBC_MINORS = range(17, 40)
PLATFORMS = {
    "x86_64": tuple(f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS),
    "aarch64": tuple(f"manylinux_2_{minor}_aarch64" for minor in GLIBC_MINORS),
}
KINDS = ("Net", "CollNet", "Tuner", "Profiler")
# Matches ncclNetPlugin_v11, ncclCollNetPlugin_v11 and ncclTunerPlugin_v5, and also ncclProfiler_v5,
# whose name has no "Plugin".
NAME = re.compile(rb"\bnccl(Net|CollNet|Tuner|Profiler)(?:Plugin)?_v(\d+)\b")
ABI = Path(__file__).resolve().parent.parent / "src" / "abi"


def main():
    arguments = parse_arguments()
    ours = {
        "Net": own_versions("net_tables.rs", "Net"),
        "Tuner": own_versions("tuner_tables.rs", "Tuner"),
    }
    print(f"On {date.today()}. This library: net {listed(ours['Net'])}; tuner {listed(ours['Tuner'])}.\n")
    print("| NCCL | packages | net | CollNet | tuner | profiler |")
    print("|---|---|---|---|---|---|")
    problems = []
    for version, packages in sorted(find_versions(arguments).items(), key=lambda item: numbers(item[0])):
        wanted = versions_of(version, packages)
        row = " | ".join(listed(wanted[kind]) for kind in KINDS)
        print(f"| {version} | {', '.join(package.removeprefix('nvidia-nccl-') for package in packages)} | {row} |", flush=True)
        problems += check(version, wanted, ours)
    for problem in problems:
        print(f"nccl-versions: {problem}", file=sys.stderr)
    return 1 if problems else 0


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--min", default="2.27", help="the oldest version to read [default: 2.27]")
    parser.add_argument("--package", action="append", choices=PACKAGES, help="only this package; may be repeated")
    arguments = parser.parse_args()
    if not re.fullmatch(r"\d+(\.\d+)*", arguments.min):
        parser.error(f"--min {arguments.min}: give a version such as 2.27")
    return arguments


def own_versions(file, kind):
    """The versions of the tables that a source file exports."""
    names = NAME.findall((ABI / file).read_bytes())
    found = {int(version) for name, version in names if name.decode() == kind}
    if not found:
        stop(f"{ABI / file} exports no table of {kind}")
    return found


def find_versions(arguments):
    """Each version with the packages that have it."""
    found = {}
    for package in arguments.package or PACKAGES:
        text = run("index", "versions", package)
        line = re.search(r"Available versions: (.*)", text)
        if not line:
            stop(f"pip lists no versions of {package}")
        for version in line[1].split(", "):
            if numbers(version) >= numbers(arguments.min):
                found.setdefault(version, []).append(package)
    return found


def versions_of(version, packages):
    """Returns the interfaces that this version looks for. All its wheels must agree."""
    seen = {}
    for package in packages:
        for machine, platforms in PLATFORMS.items():
            seen[f"{package} {machine}"] = interfaces(package, version, platforms)
    first = next(iter(seen.values()))
    for name, wanted in seen.items():
        if wanted != first:
            stop(f"{version}: {name} looks for {wanted}, {next(iter(seen))} for {first}")
    return first


def interfaces(package, version, platforms):
    with tempfile.TemporaryDirectory() as folder:
        options = [option for platform in platforms for option in ("--platform", platform)]
        run("download", "--quiet", "--no-deps", "--only-binary=:all:", *options, "--dest", folder, f"{package}=={version}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (library,) = [name for name in archive.namelist() if name.endswith("/libnccl.so.2")]
            text = archive.read(library)
    wanted = {kind: set() for kind in KINDS}
    for kind, number in NAME.findall(text):
        wanted[kind.decode()].add(int(number))
    if not wanted["Net"]:
        stop(f"{package} {version}: no name of a net plugin in {library}")
    return wanted


def check(version, wanted, ours):
    problems = []
    if not wanted["Net"] & ours["Net"]:
        problems.append(f"NCCL {version} looks for net {listed(wanted['Net'])}, and this library has {listed(ours['Net'])}")
    for kind in ("Net", "Tuner"):
        if newer := {number for number in wanted[kind] if number > max(ours[kind])}:
            problems.append(f"NCCL {version} looks for {kind.lower()} {listed(newer)} first, which this library does not have")
    return problems


def numbers(version):
    return tuple(int(part) for part in re.findall(r"\d+", version))


def listed(versions):
    return ", ".join(f"v{number}" for number in sorted(versions, reverse=True)) or "none"


def run(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        stop(f"pip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def stop(message):
    print(f"nccl-versions: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    sys.exit(main())
