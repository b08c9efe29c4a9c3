"""What is linked into a release's files: crates, the Rust standard library, and zig's unwinder.

`cargo tree` lists the crates, with each product's own features, for both architectures, without
build scripts, tests and procedural macros. It also lists the crates of the standard library, from
the library's sources (rustup component add rust-src). The licence texts are those in the sources.
Not counted are glibc's start-up code and wrappers of stat, which every program contains: their
licence sets no condition for such a program.
"""

import html
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from packageurl import PackageURL

TARGETS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu")
PRODUCTS = ("nccl-net-spark", "nccl-tests-harness", "softverbs")
# Features of the standard library that rustup installs.
STD_FEATURES = ("--features", "backtrace,panic-unwind")
STD_LICENCE = "(MIT OR Apache-2.0) AND MIT AND Apache-2.0 WITH LLVM-exception AND Unicode-3.0"
LICENCE_FILE = re.compile(r"(licen[cs]e|unlicense|copying|copyright|notice)([-._][\w.-]*)?", re.IGNORECASE)


@dataclass
class Part:
    name: str
    version: str
    licence: str
    purl: PackageURL | None = None
    is_ours: bool = False
    texts: list[str] = field(default_factory=list)
    # Keys of the parts that this part links.
    depends: set[str] = field(default_factory=set)

    @property
    def key(self):
        return f"{self.name} {self.version}".strip()


def parts():
    """Returns all parts by key, in the order of the keys."""
    ours, std = crates(Path("Cargo.toml"), PRODUCTS), standard_library()
    std_key = next(key for key in std if key.startswith("rust-std "))
    unwinder = zig_unwinder()
    for part in ours.values():
        if part.is_ours:
            part.depends |= {std_key, unwinder.key}
    found = std | ours | {unwinder.key: unwinder}
    for part in found.values():
        if not part.is_ours and not part.texts:
            sys.exit(f"linked: the sources of {part.key} have no licence text: dist/linked.py has to take it from elsewhere")
    return dict(sorted(found.items()))


def output(*command, **more):
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | more)
    if done.returncode != 0:
        sys.exit(f"linked: {' '.join(command)} failed with status {done.returncode}")
    return done.stdout


def cargo(*arguments):
    # The standard library's manifest needs unstable features of cargo.
    return output("cargo", *arguments, RUSTC_BOOTSTRAP="1")


def sysroot_folder():
    return Path(output("rustc", "--print", "sysroot").strip())


def crates(manifest, packages, options=()):
    """Returns these packages of a workspace and the crates that are linked into them, by key."""
    at = ("--locked", "--quiet", "--manifest-path", str(manifest), *options)
    keys, known, edges = set(), {}, {}
    for target in TARGETS:
        for package in packages:
            lines = cargo("tree", *at, "--package", package, "--target", target, "-e", "normal,no-proc-macro", "--prefix", "none", "-f", "{p}")
            keys |= {" ".join(line.split()[:2]).replace(" v", " ") for line in lines.splitlines() if line}
        metadata = json.loads(cargo("metadata", *at, "--format-version", "1", "--filter-platform", target))
        known |= {package["id"]: package for package in metadata["packages"]}
        for node in metadata["resolve"]["nodes"]:
            linked = {dep["pkg"] for dep in node["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])}
            edges.setdefault(node["id"], set()).update(linked)

    key_of = {identifier: f"{package['name']} {package['version']}" for identifier, package in known.items()}
    found = {}
    for identifier, package in known.items():
        if key_of[identifier] in keys:
            part = crate(package)
            part.depends = {key_of[other] for other in edges[identifier]} & keys
            found[part.key] = part
    if keys != set(found):
        sys.exit(f"linked: cargo metadata does not name {', '.join(sorted(keys - set(found)))}")
    return found


def crate(package):
    name, version = package["name"], package["version"]
    # Cargo once allowed "MIT/Apache-2.0" for a choice.
    licence = (package["license"] or "").replace("/", " OR ")
    url = PackageURL(type="cargo", name=name, version=version)
    is_ours = package["source"] is None
    texts = [] if is_ours else texts_below(Path(package["manifest_path"]).parent)
    return Part(name, version, licence, url, is_ours, texts)


def texts_below(folder):
    files = [file for file in folder.rglob("*") if LICENCE_FILE.fullmatch(file.name) and file.suffix != ".rs" and file.is_file()]
    return [file.read_text() for file in sorted(files)]


def standard_library():
    """Returns the library crates of Rust's repository as one part, and each other crate, by key."""
    sysroot = sysroot_folder()
    library, notices = sysroot / "lib/rustlib/src/rust/library", sysroot / "share/doc/rust/COPYRIGHT-library.html"
    for path, cure in ((library, "rustup component add rust-src"), (notices, "install Rust with rustup")):
        if not path.exists():
            sys.exit(f"linked: {path} not found: {cure}")
    found = crates(library / "std/Cargo.toml", ("std",), STD_FEATURES)
    release = output("rustc", "--version").split()[1]
    found = {part.key: part for part in found.values() if not part.is_ours}
    for part in found.values():
        part.depends &= set(found)
    whole = Part("rust-std", release, STD_LICENCE, depends=set(found))
    # The sources contain texts only for code from elsewhere. The notices for the rest are in the
    # documentation.
    in_tree = notices.read_text().partition('<h2 id="in-tree-files">')[2].partition("<h2")[0]
    lines = [html.unescape(re.sub("<[^>]*>", "", line)).strip() for line in in_tree.splitlines()]
    whole.texts = ["\n".join(line for line in lines if line)]
    whole.texts += [generic_text(sysroot, name, "The Rust Project Developers") for name in ("Apache-2.0", "MIT", "Unicode-3.0")]
    whole.texts += texts_below(library)
    return found | {whole.key: whole}


def generic_text(sysroot, name, holders):
    text = (sysroot / f"share/doc/rust/licenses/{name}.txt").read_text()
    return text.replace("<year> <copyright holders>", holders)


def zig_unwinder():
    """zig links its own build of LLVM's libunwind in place of libgcc_s."""
    lib = Path(find_spec("ziglang").origin).parent / "lib"
    config = (lib / "libcxx/include/__config").read_text()
    number = int(re.search(r"define _LIBCPP_VERSION (\d+)", config)[1])
    version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    text = (lib / "libunwind/LICENSE.TXT").read_text()
    return Part("libunwind", version, "Apache-2.0 WITH LLVM-exception", texts=[text])
