"""Prints the notices and licence texts of what is linked into a release's files: THIRD-PARTY-LICENSES of the packages.

    third_party.py [--debian]       --debian: the copyright file of the deb, which begins with dist/deb/copyright

Fails when the wheel's License-Expression (dist/wheel/pyproject.toml) does not cover a part, or names a licence that no part needs.
"""

import re
import sys
import textwrap
import tomllib
from pathlib import Path

from license_expression import get_spdx_licensing

from linked import parts

HEAD = """\
The programs and libraries of nccl-net-spark contain the following third-party software. If it offers several licences, you may choose
any. The licence texts are below, each with the names of those that it came with.
"""
APACHE = re.compile(r"Apache License\s+Version 2\.0, January 2004.*?END OF TERMS AND CONDITIONS", re.DOTALL)
DEBIAN_APACHE = """\
Apache License, Version 2.0
[On Debian systems, its full text is in /usr/share/common-licenses/Apache-2.0.]"""


def main():
    found = {key: part for key, part in parts().items() if not part.is_ours}
    check_expression(found.values())
    if sys.argv[1:] == ["--debian"]:
        text = notices(found, lambda text: APACHE.sub(DEBIAN_APACHE, text))
        lines = [f" {line}" if line else " ." for line in text.splitlines()]
        print(Path("dist/deb/copyright").read_text() + "\n".join(lines))
    else:
        print(notices(found, lambda text: text), end="")


def notices(found, edit):
    users, texts = {}, {}
    for part in found.values():
        for text in part.texts:
            text = edit("\n".join(line.rstrip() for line in text.splitlines()).strip("\n"))
            # Many texts differ only in their line breaks.
            same = " ".join(text.split())
            texts.setdefault(same, text)
            users.setdefault(same, {})[part.key] = True
    width = max(len(key) for key in found)
    lines = [HEAD] + [f"{key:{width}}  {part.licence}" for key, part in found.items()]
    for same, text in texts.items():
        lines += ["", "-" * 80, *textwrap.wrap(", ".join(users[same]), 80, break_on_hyphens=False), "-" * 80, "", text]
    return "\n".join(lines) + "\n"


def check_expression(found):
    spdx = get_spdx_licensing()
    declared = spdx.parse(tomllib.loads(Path("dist/wheel/pyproject.toml").read_text())["project"]["license"], validate=True)
    # An AND of the project's own choice of licences (an OR) and of single licences.
    single = {str(term) for term in declared.args if not isinstance(term, spdx.OR)}
    wanted = {part.key: spdx.parse(part.licence, validate=True) for part in found}

    def covers(licences, term):
        if isinstance(term, spdx.OR):
            return any(covers(licences, one) for one in term.args)
        if isinstance(term, spdx.AND):
            return all(covers(licences, one) for one in term.args)
        return str(term) in licences

    for key, term in wanted.items():
        if not covers(single, term):
            sys.exit(f"third_party: dist/wheel/pyproject.toml allows {', '.join(sorted(single))}: {key} is under {term}")
    for name in sorted(single):
        if all(covers(single - {name}, term) for term in wanted.values()):
            sys.exit(f"third_party: dist/wheel/pyproject.toml names {name}, which nothing that is linked needs")


if __name__ == "__main__":
    main()
