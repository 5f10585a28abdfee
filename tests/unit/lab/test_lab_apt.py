# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The hosts' Debian comes from the machine's own mirrors, and from no third-party repository."""

from __future__ import annotations

import lab_apt
import pytest

DEBIAN = """\
Types: deb deb-src
# a snapshot
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
"""
THIRD = """\
Types: deb
URIs: https://deb.third.example/node_20.x
Suites: nodistro
Components: main
Signed-By: /usr/share/keyrings/third.gpg

Types: deb
URIs: https://apt.other.example
Suites: bookworm
Components: main
Signed-By: /usr/share/keyrings/other.gpg

Types: deb
URIs: https://download.engine.example/linux/debian
Suites: bookworm
Components: stable

Types: deb
Enabled: no
URIs: http://off.example/debian
Suites: bookworm
Components: main
"""
LIST = """\
# deb http://commented.example/debian bookworm main
deb http://mirror.example/debian bookworm main contrib # the usual
deb [arch=amd64 signed-by=/usr/share/keyrings/x.gpg] https://apt.x.example bookworm main
deb-src http://mirror.example/debian bookworm main
deb http://mirror.example/debian-security bookworm-security main
deb https://cloud.example/apt cloud-sdk-bookworm main
"""


def stanza(uri, suites):
    return f"Types: deb\nURIs: {uri}\nSuites: {suites}\nComponents: main\nSigned-By: {lab_apt.KEYRING}\n"


EXPECTED = (
    stanza("http://mirror.example/debian", "bookworm bookworm-updates")
    + "\n"
    + stanza("http://mirror.example/debian-security", "bookworm-security")
)


@pytest.fixture
def etc(tmp_path):
    (tmp_path / "sources.list.d").mkdir()
    return tmp_path


def test_third_party_repositories_are_left_out(etc):
    (etc / "sources.list.d/debian.sources").write_text(DEBIAN)
    (etc / "sources.list.d/third.sources").write_text(THIRD)
    (etc / "sources.list.d/old.sources.disabled").write_text(DEBIAN.replace("mirror", "disabled"))
    assert lab_apt.debian_sources(lab_apt.read_sources(etc), "bookworm") == EXPECTED


def test_one_line_sources(etc):
    (etc / "sources.list").write_text(LIST)
    assert lab_apt.debian_sources(lab_apt.read_sources(etc), "bookworm") == EXPECTED.replace(" bookworm-updates", "")


def test_another_release_of_debian_lends_its_mirror(etc):
    (etc / "sources.list").write_text(LIST.replace("bookworm", "trixie"))
    assert lab_apt.debian_sources(lab_apt.read_sources(etc), "trixie") == EXPECTED.replace(" bookworm-updates", "")


def test_a_list_of_mirrors_in_a_file_is_read(etc, tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/mirrors.list").write_text("# ours\nhttp://mirror.example/debian\tpriority:1\nhttp://b.example\n")
    (etc / "sources.list").write_text("deb mirror+file:/etc/mirrors.list bookworm main\n")
    text = lab_apt.debian_sources(lab_apt.read_sources(etc), "bookworm", tmp_path)
    assert text == stanza("http://mirror.example/debian", "bookworm")


@pytest.mark.parametrize(
    "line",
    [
        "deb http://mirror.example/debian-security bookworm-security main",
        "deb cdrom:[Debian]/ bookworm main",
        "deb mirror+file:/etc/absent.list bookworm main",
        "deb http://mirror.example/debian trixie main",
    ],
)
def test_sources_that_make_no_root(etc, tmp_path, line):
    (etc / "sources.list").write_text(line + "\n")
    assert lab_apt.debian_sources(lab_apt.read_sources(etc), "bookworm", tmp_path) == ""


DEBIAN_12 = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\nVERSION_CODENAME=bookworm\n'
UBUNTU = "ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble\n"


def test_the_choice(etc):
    (etc / "sources.list.d/debian.sources").write_text(DEBIAN)
    debian, ubuntu = lab_apt.os_release(DEBIAN_12), lab_apt.os_release(UBUNTU)
    assert debian["PRETTY_NAME"] == "Debian GNU/Linux 12 (bookworm)"
    assert lab_apt.choose_sources(None, debian, etc) == [EXPECTED, ""]
    assert lab_apt.choose_sources(None, ubuntu, etc) == [""]
    assert lab_apt.choose_sources("http://m.example/d", ubuntu, etc) == [stanza("http://m.example/d", "bookworm")]


def test_debian_without_usable_sources(etc):
    assert lab_apt.choose_sources(None, lab_apt.os_release(DEBIAN_12), etc) == [""]
