# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import hashlib

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import (
    Digest,
    Entry,
    ListingError,
    parse_stored,
    parse_tree,
    why_unsafe,
)

SHA256, SHA1 = "a" * 64, "b" * 40


def item(path: object, **changes: object) -> dict[str, object]:
    return {"type": "file", "path": path, "size": 3, "oid": SHA1, **changes}


@pytest.mark.parametrize(
    "path",
    [
        "config.json",
        "a/b/c.json",
        "name with spaces",
        "ünïcode",
        ".gitattributes",
        "..dots",
        "a..b/c",
        "x/checkpoint.json",
    ],
)
def test_ordinary_names_pass(path: str) -> None:
    assert why_unsafe(path) is None


@pytest.mark.parametrize(
    "path",
    [
        "",
        None,
        7,
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a/..",
        "./a",
        "a//b",
        "a/",
        "a\nb",
        "a\0b",
        "\x7f",
        "\ud800",
        "x" * 256,
        ".kimi-k3/lock",
        ".kimi-k3",
        "checkpoint.json",
    ],
)
def test_unsafe_names_are_refused(path: object) -> None:
    assert why_unsafe(path)
    with pytest.raises(ListingError):
        parse_tree([item(path)])


def test_tree_entries_keep_the_digest_that_proves_them() -> None:
    entries = parse_tree(
        [
            item("b.json"),
            {"type": "directory", "path": "sub", "oid": SHA1, "size": 0},
            item("a.safetensors", size=130, lfs={"oid": SHA256, "size": 1000, "pointerSize": 130}),
            item("c.safetensors", lfs={"oid": f"sha256:{SHA256}", "size": 5}),
        ]
    )
    assert entries == [
        Entry("a.safetensors", 1000, SHA256),
        Entry("b.json", 3, None, SHA1),
        Entry("c.safetensors", 5, SHA256),
    ]
    assert parse_stored(entry.as_dict() for entry in entries) == entries


@pytest.mark.parametrize(
    "items",
    [
        ["text"],
        [item("a", size=None)],
        [item("a", size=-1)],
        [item("a", size="3")],
        [item("a", oid=None)],
        [item("a", oid="main")],
        [item("a", lfs={"oid": "zz", "size": 3})],
        [item("a"), item("a")],
        [item("a"), item("a/b")],
    ],
)
def test_listings_that_prove_nothing_are_refused(items: list[object]) -> None:
    with pytest.raises(ListingError):
        parse_tree(items)


def test_digests() -> None:
    data = b"some bytes"
    large = Digest(Entry("x", len(data), hashlib.sha256(data).hexdigest()))
    blob = hashlib.sha1(b"blob 10\0" + data, usedforsecurity=False).hexdigest()
    small = Digest(Entry("x", len(data), None, blob))
    for digest in (large, small):
        assert not digest.right
        digest.update(data[:3])
        digest.update(memoryview(data)[3:])
        assert digest.right
        assert digest.sha256 == hashlib.sha256(data).hexdigest()
    assert large.blob is None
    assert small.found == f"git-blob:{blob}"
