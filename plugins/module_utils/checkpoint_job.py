# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bring a directory to hold one revision of a checkpoint, whole or one stage of it, and prove that it does.

Everything a run learns is kept in C(.kimi-k3/) beside the files: the listing and the index of the pinned revision
(which never change), the plan made from them, and the receipts. A later run that finds all of it in place needs neither
the network nor the bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.baremetal.kimi_k3.plugins.module_utils import checkpoint_plan as planning
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import fetch, joint, revisions
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.checkpoint_plan import INDEX_NAME, Selection
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.exchange import Exchange
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.hub import Hub, HubError, Nowhere, Source
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.joint import Board
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.lease import Lease, copies_of, leased, look_again
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.listing import (
    PRIVATE_DIR,
    SUMMARY_NAME,
    Digest,
    Entry,
    ListingError,
    parse_stored,
    parse_tree,
)
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.receipts import (
    ChangedError,
    Receipts,
    StoppedError,
    hash_files,
    reading_threads,
)
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.safetensors_header import StructureError, check_file
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import (
    Lock,
    StorageError,
    check_directories,
    check_filesystem,
    host_id,
    human,
    locked,
    make_dirs,
    read_json,
    sync_dir,
    utc_now,
    why_no_room,
    write_atomic,
    write_json,
)

SCHEMA = 1
_CONFIG_NAME = "config.json"
_SAFETENSORS = ".safetensors"
_ROLLING_THREADS = 4
_LARGE = 1 << 20  # from here on a file is not simply read into memory
_PIECE = 1 << 20

# What a run may fail with, each with a text that says what to do.
ERRORS = (
    planning.PlanError,
    ListingError,
    HubError,
    fetch.FetchError,
    StorageError,
    ChangedError,
    StructureError,
)


@dataclass
class Request:
    """What to hold, where, and how to get it."""

    repository: str
    revision: str
    dest: str
    scope: str
    pipeline_layers: Sequence[int]
    stages: Sequence[int]
    language_model_only: bool
    hub: Hub | Nowhere
    mirrors: Sequence[Source] = ()
    exchange: Exchange | None = None
    listing_file: str | None = None
    layers: int | None = None
    verify: str = "receipt"
    verify_seconds: float = 0.0  # after which a rolling proof begins no other file; 0 is no limit
    verify_bytes: int = 0  # that a rolling proof reads at most, but for the last file; 0 is no limit
    options: fetch.Options = field(default_factory=fetch.Options)
    lock_timeout: float = 0.0
    shared: bool = False  # other hosts work in the same directory
    shared_timeout: float = 60.0  # of silence after which one of them is taken for gone
    allow_tmpfs: bool = False
    keep_revisions: int = 0  # beside each other, this one counted; 0 removes none
    protect: Sequence[str] = ()  # files that name revisions in use
    check: bool = False
    tell: Callable[[str], None] = lambda _state: None  # takes what the run waits for, again and again
    stop: threading.Event = field(default_factory=threading.Event)


@dataclass
class Plan:
    """The files to hold and what their sum is called."""

    inputs: dict[str, Any]
    entries: list[Entry]
    summary: dict[str, Any]
    plan_digest: str
    identity_digest: str
    warnings: list[str]
    index: Entry | None = None  # the index at the top of the directory, as written

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.entries)

    @property
    def paths(self) -> set[str]:
        return {entry.path for entry in self.entries}

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "inputs": self.inputs,
            "summary": self.summary,
            "plan_digest": self.plan_digest,
            "identity_digest": self.identity_digest,
            "warnings": self.warnings,
            "index": self.index.as_dict() if self.index else None,
            "files": [entry.as_dict() for entry in self.entries],
        }

    @classmethod
    def stored(cls, path: str) -> Plan | None:
        value = read_json(path)
        try:
            if value["schema"] != SCHEMA or value["inputs"]["planner"] != planning.PLANNER:
                return None
            return cls(
                inputs=value["inputs"],
                entries=parse_stored(value["files"]),
                summary=value["summary"],
                plan_digest=value["plan_digest"],
                identity_digest=value["identity_digest"],
                warnings=value["warnings"],
                index=parse_stored([value["index"]])[0] if value["index"] else None,
            )
        except (KeyError, TypeError, ListingError):
            return None


@dataclass
class Outcome:
    """What a run found and did, or in check mode would do."""

    plan: Plan
    changed: bool
    fetch: list[str] = field(default_factory=list)
    fetched_bytes: int = 0
    peer_bytes: int = 0
    resumed_bytes: int = 0
    hashed: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    linked: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    verified: str = ""
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class Checkpoint:
    """One destination."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._dest = os.path.abspath(request.dest)
        self._private = os.path.join(self._dest, PRIVATE_DIR)
        self._index_path = self._own(INDEX_NAME)
        self._lease: Lease | None = None
        self._receipts = self._book()
        self._progress = fetch.Progress()
        self._hashed: set[str] = set()
        self._found: dict[str, str] = {}  # digests of files that are wrong
        self._early: list[Entry] = []  # fetched before there was a plan
        self._resumed_early = 0  # bytes of those that an earlier run had fetched
        self._warnings: list[str] = []
        self._helped = 0  # files that other hosts have hashed for this one
        stage = request.scope == "stage"
        counts: tuple[int, ...] = ()
        if stage or request.pipeline_layers:
            counts = planning.check_layers(request.pipeline_layers, request.layers)
        stages = planning.check_stages(request.stages if stage else None, len(counts))
        self._inputs = {
            "planner": planning.PLANNER,
            "repository": request.repository,
            "revision": request.revision,
            "scope": request.scope,
            "stages": list(stages),
            "pipeline_layers": list(counts),
            "language_model_only": request.language_model_only,
        }

    def ensure(self) -> Outcome:
        """Do what is needed, which may be nothing."""
        exchange = self._request.exchange
        outcome = None if exchange else self.at_once()
        if outcome is not None:
            return outcome
        self.prepare()
        if self._request.check:
            return self._work()
        progress_path = self._own("progress.json")
        with self._alone(lambda: fetch.describe(read_json(progress_path))):
            self._request.tell("")
            # Whoever was at work before may have done it all.
            self._receipts = self._book()
            outcome = None if exchange else self.at_once() or self._jointly()
            if outcome is not None:
                return outcome
            about = {
                "repository": self._request.repository,
                "revision": self._request.revision,
                "host": socket.gethostname(),
                "pid": os.getpid(),
            }
            self._progress = fetch.Progress(progress_path, about, temporary=self._temporary("progress.tmp"))
            self._progress.begin("planning")
            with self._progress.reported(), exchange or contextlib.nullcontext():
                try:
                    outcome = self._work()
                    if exchange:
                        self._progress.state = exchange.waits_for()
                        exchange.finish()
                        self._warnings += [exchange.warning] if exchange.warning else []
                except BaseException as error:
                    self._progress.state = f"failed: {error}" if isinstance(error, ERRORS) else "interrupted"
                    raise
                self._progress.state = "done"
            return outcome

    @contextlib.contextmanager
    def _alone(self, state: Callable[[], str]) -> Iterator[None]:
        """Be the only run in this directory."""
        request = self._request

        def waits(holder: str) -> None:
            request.tell(f"waiting for {holder}")

        lock = Lock(self._own("lock"), state)
        if not (request.shared or leased(self._private)):
            with locked(lock, request.lock_timeout, waits):
                # A run that shares it looks for this lock once the lease is there: one of the two sees the other.
                if not leased(self._private):
                    yield
                    return
        lease = Lease(self._private, request.shared_timeout, state=state, on_lost=request.stop.set)
        # Locks of other hosts may outlive these hosts, so each one has its own, and the lease is between them.
        with locked(Lock(self._own(f"lock.{host_id()}"), state), request.lock_timeout, waits):
            lease.prepare()
            with locked(lock, request.lock_timeout, waits):
                pass
            lease.acquire(waits, meanwhile=self._help)
            self._lease = lease
            self._look_again(lease)
            try:
                yield
                lease.renew()
                lease.bequeath()
                joint.forget(self._private)
            except Exception as error:
                if lease.gone():
                    raise StorageError(lease.reason) from error
                raise
            finally:
                lease.release()

    def _look_again(self, lease: Lease) -> None:
        """See what others have done, and not what this host remembers of the time before."""
        if lease.seen:
            plan = Plan.stored(self._own("plan.json"))
            files = [self._final(entry) for entry in plan.entries] if plan else []
            for directory in sorted({self._dest, self._private, *map(os.path.dirname, files)}):
                look_again(directory, lease.token)

    def _help(self, holder: str) -> None:
        """While another host is at work: hash a part of what it has to hash."""
        request = self._request

        def begin(files: int) -> None:
            request.tell(f"hashing a part of {files} files, another host hashes the others")

        Board(self._private, holder, request.shared_timeout).help(self._final, request.stop.is_set, begin)

    def _jointly(self) -> Outcome | None:
        """The outcome when another host has hashed all of it while this one waited and helped."""
        if self._request.verify != "full" or self._lease is None:
            return None
        proven = read_json(self._own("proven.json"))
        if not isinstance(proven, dict) or proven.get("holder") not in self._lease.seen:
            return None
        outcome = self._by_receipts()
        if outcome is None or outcome.plan.plan_digest != proven.get("plan_digest"):
            return None
        outcome.verified = f"sha256 (together with {proven.get('host')})"
        return outcome

    def prepare(self) -> None:
        """Make sure that this is a place for a checkpoint."""
        check_directories(self._private)
        check_filesystem(self._dest, self._request.allow_tmpfs)
        if not self._request.check:
            make_dirs(self._private)

    # The cheap way

    def at_once(self) -> Outcome | None:
        """The outcome when receipts prove all of it."""
        return self._by_receipts() if self._request.verify == "receipt" else None

    def _by_receipts(self) -> Outcome | None:
        plan = Plan.stored(self._own("plan.json"))
        if plan is None or plan.inputs != self._inputs:
            return None
        if not all(self._receipts.matches(entry.path, self._final(entry), entry) for entry in plan.entries):
            return None
        if plan.index and not self._receipts.matches(INDEX_NAME, os.path.join(self._dest, INDEX_NAME), plan.index):
            return None
        stored = read_json(self._summary_path)
        if not isinstance(stored, dict) or _essence(stored) != self._essence(plan):
            return None
        if self._surplus():
            return None
        described = self._describe(plan)
        return Outcome(
            plan,
            False,
            verified=self._verified(plan),
            before=described,
            after=described,
            warnings=list(plan.warnings),
        )

    # The long way

    def _work(self) -> Outcome:
        request = self._request
        previous = Plan.stored(self._own("plan.json"))
        entries = {entry.path: entry for entry in self._listing()}
        index = entries.get(INDEX_NAME)
        if index is None and request.scope == "stage":
            raise planning.PlanError(
                f"{request.repository} has no {INDEX_NAME}, so its tensors cannot be told apart: set scope to all."
            )
        weight_map, index_digest = self._weights(index) if index else ({}, None)
        absent = planning.absent_files(weight_map, entries)
        if absent:
            raise planning.PlanError(
                f"{INDEX_NAME} of {request.repository} names {planning.shorten(absent)}, but the listing of revision "
                f"{request.revision} has no such file: choose a revision that is complete."
            )
        selection = self._select(weight_map, entries)
        plan = self._plan(entries, selection, index_digest)
        self._warnings += plan.warnings
        names = self._names(weight_map, selection)
        weight_files = selection.files if selection else []
        # At full size these are most of the memory, and what follows needs memory of its own.
        del weight_map, selection

        wanted, wrong = self._survey(plan)
        if wrong or (wanted and (previous is None or {entry.path for entry in wanted} & previous.paths)):
            self._withdraw()
        linked = self._link_equal(wanted, wrong)
        wanted = [entry for entry in wanted if entry not in linked]
        if wanted and self._only_looks:
            self._refuse_to_fetch(plan, wanted)
        sizes: dict[str, int] = {}
        for entry in plan.entries:
            there = entry not in wanted and not (request.check and entry in linked)
            if entry.path.endswith(_SAFETENSORS) and there:
                sizes[entry.path] = self._inspect(entry, self._final(entry), names.get(entry.path, []))

        self._check_room(wanted)
        outcome = Outcome(
            plan,
            False,
            [entry.path for entry in wanted],
            hashed=sorted(self._hashed.difference(entry.path for entry in self._early)),
        )
        outcome.linked = sorted(entry.path for entry in linked)
        outcome.before = self._describe(previous) if previous else {}
        outcome.after = self._describe(plan)
        if request.check:
            outcome.fetched_bytes = sum(entry.size - fetch.journaled(self._work_directory, entry) for entry in wanted)
        elif wanted:
            self._fetch(wanted, names, sizes, outcome)
            outcome.replaced = [entry.path for entry in wanted if entry.path in wrong]
            self._warnings += [
                f"{entry.path} was not as listed and has been fetched again; the old file is "
                f"{fetch.replaced_path(self._private, entry)} and may be removed."
                for entry in wanted
                if entry.path in wrong
            ]
        held = {entry.path for entry in plan.entries}
        outcome.fetch = sorted({*outcome.fetch, *(entry.path for entry in self._early if entry.path in held)})
        outcome.fetched_bytes += sum(entry.size for entry in self._early) - self._resumed_early
        outcome.resumed_bytes += self._resumed_early
        index_changed = bool(outcome.fetch or outcome.linked)
        if index and not (request.check and (wanted or linked)):
            if request.scope == "stage":
                total = sum(sizes[file] for file in weight_files if file in sizes)
                content = planning.pruned_index({file: names[file] for file in weight_files}, total)
            else:
                names.clear()
                content = self._pristine(index)
            index_changed = self._put_index(plan, content)
        stored = read_json(self._summary_path)
        summary_changed = not isinstance(stored, dict) or _essence(stored) != self._essence(plan)
        outcome.changed = bool(outcome.fetch or outcome.linked) or index_changed or summary_changed
        if not request.check:
            self._conclude(plan, summary_changed)
            fetch.forget_parts(self._work_directory, entries.values())
        outcome.removed = self._remove_surplus()
        outcome.changed = outcome.changed or bool(outcome.removed)
        outcome.verified = self._verified(plan)
        outcome.warnings = self._warnings
        return outcome

    @staticmethod
    def _names(weight_map: dict[str, str], selection: Selection | None) -> dict[str, list[str]]:
        """Which tensors the index places in each file of the selection."""
        if selection is None or selection.scope == "all":
            return selection.tensors if selection else {}
        names: dict[str, list[str]] = {file: [] for file in selection.files}
        for name, file in weight_map.items():
            if file in names:
                names[file].append(name)
        return names

    def _listing(self) -> list[Entry]:
        """All files of the revision; asked for once, since a commit never changes."""
        path = self._own("listing.json")
        stored = read_json(path)
        about = {"schema": SCHEMA, "repository": self._request.repository, "revision": self._request.revision}
        if isinstance(stored, dict) and all(stored.get(key) == value for key, value in about.items()):
            try:
                return parse_stored(stored["files"])
            except (KeyError, TypeError, ListingError):
                pass
        if self._request.listing_file:
            tree = read_json(self._request.listing_file)
            if not isinstance(tree, list):
                raise ListingError(
                    f"listing_file {self._request.listing_file} is absent or holds no list: save there what the Hub "
                    f"answers to /api/models/{self._request.repository}/tree/{self._request.revision}?recursive=true."
                )
            entries = parse_tree(tree)
        else:
            entries = self._request.hub.listing()
        if not self._request.check:
            files = [entry.as_dict() for entry in entries]
            self._write(path, {**about, "endpoint": self._request.hub.endpoint, "files": files})
        return entries

    def _pristine(self, entry: Entry) -> bytes:
        """The index as the repository has it."""
        for path in (self._index_path, os.path.join(self._dest, INDEX_NAME)):
            data = _proven(path, entry)
            if data is not None:
                break
        else:
            data, _digest = self._read(entry)
            if entry not in self._early:
                self._early.append(entry)
            path = ""
        if path != self._index_path and not self._request.check:
            self._guard()
            write_atomic(self._index_path, data, temporary=self._temporary("written.tmp"))
        self._offer(entry, self._index_path)
        return data

    def _read(self, entry: Entry) -> tuple[bytes, Digest]:
        """A file that planning needs, from elsewhere."""
        exchange = self._request.exchange
        if exchange and not self._request.check:
            return exchange.read(entry, self._outside)
        return self._outside(entry)

    def _outside(self, entry: Entry) -> tuple[bytes, Digest]:
        """The index is large enough to be fetched like all other files, so that it need not come in one go."""
        if self._request.check or self._only_looks or entry.size < _LARGE:
            return self._request.hub.read(entry)
        path = self._temporary("early")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        task = fetch.Task(entry, path)
        self._progress.begin("fetching", 1, entry.size)
        self._fetcher(lambda *_: None).run([task])
        self._progress.begin("planning")
        self._resumed_early += task.resumed
        with open(path, "rb") as stream:
            data = stream.read()
        os.unlink(path)
        digest = Digest(entry)
        digest.update(data)
        return data, digest

    def _offer(self, entry: Entry, path: str) -> None:
        if self._request.exchange:
            self._request.exchange.offer(entry, path)

    def _weights(self, entry: Entry) -> tuple[dict[str, str], str]:
        """Which file holds which tensor, and the digest of the index that says so."""
        data = self._pristine(entry)
        try:
            return planning.parse_index(data), hashlib.sha256(data).hexdigest()
        except ValueError as error:
            if isinstance(error, planning.PlanError):
                raise
            raise planning.PlanError(f"{INDEX_NAME} of {self._request.repository} is not JSON ({error}).") from error

    def _select(self, weight_map: dict[str, str], entries: dict[str, Entry]) -> Selection | None:
        if not weight_map:
            return None
        return planning.select(
            weight_map,
            scope=self._request.scope,
            pipeline_layers=self._inputs["pipeline_layers"],
            stages=self._inputs["stages"],
            language_model_only=self._request.language_model_only,
            tied_embeddings=self._request.scope == "stage" and self._tied(entries.get(_CONFIG_NAME)),
        )

    def _tied(self, entry: Entry | None) -> bool:
        """Whether the model's configuration says that embeddings serve as the head, too."""
        if entry is None:
            return False
        final = self._final(entry)
        data = _proven(final, entry)
        if data is None:
            self._withdraw()
            data, digest = self._read(entry)
            if not self._request.check and not os.path.lexists(final):
                self._guard()
                write_atomic(final, data, temporary=self._temporary("early.tmp"))
                self._record(entry, os.stat(final), digest, self._request.hub.name)
                self._early.append(entry)
                self._hashed.add(entry.path)
                self._offer(entry, final)
        try:
            config = json.loads(data)
            return bool(
                config.get("tie_word_embeddings") or (config.get("text_config") or {}).get("tie_word_embeddings")
            )
        except (ValueError, AttributeError):
            return False

    def _plan(self, entries: dict[str, Entry], selection: Selection | None, index_digest: str | None) -> Plan:
        hold, left = planning.files_to_hold(entries, selection)
        held = [entries[path] for path in hold]
        request = self._request
        if index_digest is None:
            index_digest = planning.digest_of([entry.as_dict() for entry in held])
        summary = selection.summary() if selection else {"scope": "all", "weight_files": []}
        # Files beside the index that hold weights in another form: no stage needs them.
        indexed = set(selection.tensors) if selection else set()
        summary["other_files"] = len([path for path in hold if path not in indexed])
        summary["left_out"] = len(left)
        return Plan(
            inputs=self._inputs,
            entries=held,
            summary=summary,
            plan_digest=planning.digest_of(
                {
                    "repository": request.repository,
                    "revision": request.revision,
                    "selection": selection.digest if selection else None,
                    "files": {entry.path: [entry.size, entry.digest] for entry in held},
                }
            ),
            identity_digest=planning.identity_digest(
                repository=request.repository,
                revision=request.revision,
                scope=request.scope,
                pipeline_layers=self._inputs["pipeline_layers"],
                language_model_only=request.language_model_only,
                index_digest=index_digest,
            ),
            warnings=selection.warnings if selection else [],
        )

    def _survey(self, plan: Plan) -> tuple[list[Entry], set[str]]:
        """Files to fetch, and which of them are there but wrong."""
        request = self._request
        wanted: list[Entry] = []
        wrong: set[str] = set()
        unproven: list[Entry] = []
        proven: list[tuple[str, Entry]] = []
        root = os.path.realpath(self._dest)
        for entry in plan.entries:
            final = self._final(entry)
            parent = os.path.realpath(os.path.dirname(final))
            if parent != root and not parent.startswith(root + os.sep):
                raise StorageError(f"{os.path.dirname(final)} is a link that leaves {self._dest}: remove it.")
            if not os.path.lexists(final):
                wanted.append(entry)
            elif not os.path.isfile(final) or os.path.getsize(final) != entry.size:
                wanted.append(entry)
                wrong.add(entry.path)
            elif request.verify == "full" or not (receipt := self._receipts.matches(entry.path, final, entry)):
                unproven.append(entry)
            else:
                proven.append((receipt["hashed"], entry))
                self._offer(entry, final)
        if request.exchange:
            request.exchange.ready(unproven)
        # The biggest first, so that no thread is left with one of them at the end.
        unproven.sort(key=lambda entry: -entry.size)
        rolling = self._oldest(proven) if request.verify == "rolling" else []
        for entries, seconds in ((unproven, 0.0), (rolling, request.verify_seconds)):
            for entry, digest in self._hash(entries, seconds):
                wanted.append(entry)
                wrong.add(entry.path)
                self._found[entry.path] = digest
        return sorted(wanted, key=lambda entry: entry.path), wrong

    def _oldest(self, proven: list[tuple[str, Entry]]) -> list[Entry]:
        """The files whose bytes were looked at longest ago, as many as may be read now."""
        chosen: list[Entry] = []
        left = self._request.verify_bytes
        for _hashed, entry in sorted(proven, key=lambda pair: (pair[0], pair[1].path)):
            if self._request.verify_bytes and left <= 0:
                break
            chosen.append(entry)
            left -= entry.size
        return chosen

    def _hash(self, entries: list[Entry], seconds: float) -> list[tuple[Entry, str]]:
        """Hash files that are here, for so many seconds if not 0; those that are wrong, and their digests."""
        wrong: list[tuple[Entry, str]] = []
        if not entries:
            return wrong
        self._progress.begin("hashing", len(entries), sum(entry.size for entry in entries))
        deadline = time.monotonic() + seconds

        def done(entry: Entry, digest: Digest, stats: os.stat_result) -> None:
            self._progress.close(entry)
            if digest.right:
                self._hashed.add(entry.path)
                previous = self._receipts.get(entry.path)
                self._record(entry, stats, digest, previous["source"] if previous else "found")
                if previous is None and not self._request.check:
                    # A run that was killed after the file got its name has left the notes of how far it was.
                    fetch.forget_part(self._work_directory, entry)
                self._offer(entry, self._final(entry))
            else:
                wrong.append((entry, digest.found))
                if not self._request.check:
                    self._receipts.drop(entry.path)
                # Now, and not only when all the others are hashed, which may take long.
                self._withdraw()

        def hash_here(files: list[Entry], claim: Callable[[Entry], bool] = lambda _entry: True) -> list[Entry]:
            return hash_files(
                [(self._final(entry), entry) for entry in files],
                done=done,
                stopped=self._request.stop.is_set,
                # Few at once, so that those begun are likely to be done in time.
                threads=min(_ROLLING_THREADS, reading_threads(len(files))) if seconds else None,
                enough=lambda: seconds > 0 and time.monotonic() >= deadline,
                advance=self._progress.count,
                claim=claim,
            )

        if self._lease is None or seconds or self._request.check:
            hash_here(entries)
            return wrong
        board = Board(self._private, self._lease.token, self._request.shared_timeout)
        board.put_up(entries)
        try:

            def told(entry: Entry, digest: Any, stats: os.stat_result) -> None:
                self._helped += 1
                self._progress.count(entry.size)
                done(entry, digest, stats)

            others = hash_here(entries, board.claim)
            hash_here(board.collect(others, self._final, told, self._request.stop.is_set))
        finally:
            board.take_down()
        return wrong

    def _refuse_to_fetch(self, plan: Plan, wanted: list[Entry]) -> None:
        """With nobody to ask, what is missing is an error."""

        def why(entry: Entry) -> str:
            if entry.path in self._found:
                return f"{entry.path} has the digest {self._found[entry.path]}, the listing says {entry.digest}"
            if not os.path.lexists(self._final(entry)):
                return f"{entry.path} is absent"
            return f"{entry.path} is no file of {entry.size} bytes"

        raise fetch.FetchError(
            f"{len(wanted)} of {len(plan.entries)} files in {self._dest} are not as listed "
            f"({human(sum(entry.size for entry in wanted))}): {planning.shorten(map(why, wanted))}. "
            "Nothing was fetched, since source is present: run again with source hub, or put the right files there."
        )

    def _inspect(self, entry: Entry, path: str, names: list[str]) -> int:
        try:
            return check_file(path, entry.size, names)
        except StructureError as error:
            raise StructureError(f"{entry.path} of {self._request.repository}: {error}") from error

    def _check_room(self, wanted: list[Entry]) -> None:
        missing = sum(entry.size - fetch.allocated(self._work_directory, entry) for entry in wanted)
        reason = why_no_room(self._dest, missing)
        if reason and self._request.check:
            self._warnings.append(reason)
        elif reason:
            raise StorageError(reason)

    def _fetch(self, wanted: list[Entry], names: dict[str, list[str]], sizes: dict[str, int], outcome: Outcome) -> None:
        self._progress.begin("fetching", len(wanted), sum(entry.size for entry in wanted))

        def task(entry: Entry) -> fetch.Task:
            if not entry.path.endswith(_SAFETENSORS):
                return fetch.Task(entry, self._final(entry))
            return fetch.Task(
                entry, self._final(entry), lambda path: check_file(path, entry.size, names.get(entry.path, []))
            )

        def done(task: fetch.Task, stats: os.stat_result, digest: Digest, source: str, details: Any) -> None:
            if details is not None:
                sizes[task.entry.path] = details
            self._hashed.add(task.entry.path)
            self._record(task.entry, stats, digest, source)
            self._offer(task.entry, task.final)

        tasks = [task(entry) for entry in wanted]
        exchange = self._request.exchange
        if exchange and not exchange.first:
            tasks.reverse()
        self._fetcher(done, exchange).run(tasks)
        outcome.peer_bytes = sum(task.near for task in tasks)
        outcome.fetched_bytes = sum(task.fetched for task in tasks)
        outcome.resumed_bytes = sum(task.resumed for task in tasks)

    def _fetcher(self, done: Callable[..., None], exchange: Exchange | None = None) -> fetch.Fetcher:
        return fetch.Fetcher(
            [*self._request.mirrors, self._request.hub],
            self._private,
            options=self._request.options,
            progress=self._progress,
            stop=self._request.stop,
            done=done,
            exchange=exchange,
            work=self._work_directory,
            copies=copies_of(self._lease.inherited) if self._lease else (),
            guard=self._guard,
        )

    def _put_index(self, plan: Plan, content: bytes) -> bool:
        """Write the index at the top of the directory if it differs; whether it did."""
        path = os.path.join(self._dest, INDEX_NAME)
        plan.index = Entry(INDEX_NAME, len(content), hashlib.sha256(content).hexdigest())
        differs = not _same(path, content)
        if self._request.check:
            return differs
        if differs:
            self._guard()
            write_atomic(path, content, temporary=self._temporary("written.tmp"))
        if not self._receipts.matches(INDEX_NAME, path, plan.index):
            digest = Digest(plan.index)
            digest.update(content)
            self._record(plan.index, os.stat(path), digest, "plan")
        return differs

    def _withdraw(self) -> None:
        """Say no longer that the directory is proven, until it is: whoever asks finds no statement.

        A running engine has its files open and does not ask.
        """
        if self._request.check:
            return
        self._guard()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._summary_path)
            sync_dir(self._dest)

    def _conclude(self, plan: Plan, summary_changed: bool) -> None:
        path = self._own("plan.json")
        if read_json(path) != plan.as_dict():
            self._write(path, plan.as_dict())
        everything = all(entry.path in self._hashed for entry in plan.entries)
        if summary_changed or everything or self._request.verify == "rolling":
            times = [receipt["hashed"] for entry in plan.entries if (receipt := self._receipts.get(entry.path))]
            proven = utc_now() if everything else min(times, default=utc_now())
            verify = "full" if everything else self._request.verify
            summary = {**self._essence(plan), "proven": proven, "verify": verify}
            self._write(self._summary_path, summary)
        if self._lease and everything and self._request.verify == "full":
            about = {"holder": self._lease.token, "host": socket.gethostname(), "plan_digest": plan.plan_digest}
            self._write(self._own("proven.json"), about)

    # Other revisions beside this one

    def _link_equal(self, wanted: list[Entry], wrong: set[str]) -> list[Entry]:
        """Take over what another revision holds already."""

        full = self._request.verify == "full"

        def linked(entry: Entry, stats: os.stat_result, receipt: dict[str, Any], revision: str) -> None:
            receipt = {**receipt, "hashed": utc_now()} if full else receipt
            self._receipts.adopt(entry.path, stats, receipt, f"revision {revision}")
            fetch.forget_part(self._work_directory, entry)
            self._offer(entry, self._final(entry))

        if not wanted or self._only_looks:
            return []
        taken = revisions.link_equal(
            self._dest,
            self._request.repository,
            [entry for entry in wanted if entry.path not in wrong],
            temporary=self._temporary("link.tmp"),
            dry=self._request.check,
            linked=linked,
            right=self._right_elsewhere if full else None,
        )
        if full:
            self._hashed.update(entry.path for entry in taken)
        return taken

    def _right_elsewhere(self, files: list[tuple[str, Entry]]) -> set[str]:
        """Which files of another revision hold what they should, by hashing them."""
        right: set[str] = set()

        def done(entry: Entry, digest: Digest, _stats: os.stat_result) -> None:
            self._progress.close(entry)
            path = paths[entry.path]
            if digest.right:
                right.add(path)
            else:
                self._warnings.append(f"{path} has the digest {digest.found}, and not that of its receipt: not taken.")

        paths = {entry.path: path for path, entry in files}
        self._progress.begin("hashing", len(files), sum(entry.size for _path, entry in files))
        hash_files(files, done=done, stopped=self._request.stop.is_set, advance=self._progress.count)
        return right

    @property
    def _only_looks(self) -> bool:
        """With nobody to ask, files are left as they are: those of this revision, and those beside it."""
        return isinstance(self._request.hub, Nowhere)

    def _surplus(self) -> list[revisions.Revision]:
        request = self._request
        if self._only_looks:
            return []
        return revisions.surplus(self._dest, request.repository, request.keep_revisions, request.protect)

    def _remove_surplus(self) -> list[str]:
        """Remove the oldest revisions beyond the number to keep; those that were, or would be, removed."""
        old = self._surplus()
        if self._request.check:
            return [revision.path for revision in old]
        if self._request.keep_revisions and not self._only_looks:
            revisions.forget_removed(self._dest)
        removed = []
        for revision in old:
            beside = revisions.others(self._dest, self._request.repository)
            kept = [(other.path, other.receipts) for other in beside if other.path != revision.path]
            readable = [(path, receipts) for path, receipts in kept if receipts is not None]
            if revisions.remove(revision, [(self._dest, self._receipts), *readable]):
                removed.append(revision.path)
        return removed

    # Small things

    @property
    def _summary_path(self) -> str:
        return os.path.join(self._dest, SUMMARY_NAME)

    def _own(self, name: str) -> str:
        return os.path.join(self._private, name)

    @property
    def _work_directory(self) -> str:
        """Where this run alone writes: of several hosts in one directory, each has its own."""
        return self._lease.work if self._lease else self._private

    def _temporary(self, name: str) -> str:
        return os.path.join(self._work_directory, name)

    def _guard(self) -> None:
        """Fail when another host is at work in the place of this one."""
        if self._lease:
            self._lease.renew()

    def _book(self) -> Receipts:
        temporary = self._temporary("receipts.tmp")
        path, revision = self._own("receipts.json"), self._request.revision
        return Receipts(path, revision, temporary=temporary, guard=self._guard)

    def _write(self, path: str, value: Any) -> None:
        self._guard()
        write_json(path, value, temporary=self._temporary("written.tmp"))

    def _final(self, entry: Entry) -> str:
        return os.path.join(self._dest, entry.path)

    def _record(self, entry: Entry, stats: os.stat_result, digest: Digest, source: str) -> None:
        if not self._request.check:
            self._receipts.put(entry.path, stats, digest, source)

    def _essence(self, plan: Plan) -> dict[str, Any]:
        """What the summary file says of a plan."""
        return {
            "schema": SCHEMA,
            **{key: plan.inputs[key] for key in self._inputs if key != "planner"},
            "plan_digest": plan.plan_digest,
            "identity_digest": plan.identity_digest,
            "files": len(plan.entries),
            "bytes": plan.size,
        }

    def _describe(self, plan: Plan) -> dict[str, Any]:
        """A plan for the eyes of a person who reads a difference."""
        return {**self._essence(plan), "holds": [f"{entry.path} {entry.size}" for entry in plan.entries]}

    def _verified(self, plan: Plan) -> str:
        now = [entry for entry in plan.entries if entry.path in self._hashed]
        receipts = [self._receipts.get(entry.path) for entry in plan.entries if entry.path not in self._hashed]
        times = sorted(receipt["hashed"] for receipt in receipts if receipt)
        parts = []
        if now:
            words = "sha256" if not times else f"sha256 for {len(now)} files"
            parts.append(f"{words} ({self._helped} of them by another host)" if self._helped else words)
        if times:
            parts.append(f"receipt (hashed {times[0]})" if not now else f"receipt for {len(times)} (hashed {times[0]})")
        return ", ".join(parts) or "not yet"


def _essence(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary without what says only when and how it was proven."""
    return {key: value for key, value in summary.items() if key not in ("proven", "verify")}


def _read(path: str, size: int) -> bytes | None:
    """A file of the given size, nothing when there is no such file."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(size + 1)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    return data if len(data) == size else None


def _same(path: str, content: bytes) -> bool:
    """Whether a file has this content, without a second copy of it in memory."""
    view, done = memoryview(content), 0
    try:
        with open(path, "rb") as stream:
            while piece := stream.read(_PIECE):
                if piece != view[done : done + len(piece)]:
                    return False
                done += len(piece)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return False
    return done == len(content)


def _proven(path: str, entry: Entry) -> bytes | None:
    """A small file, when it has the digest it should have."""
    data = _read(path, entry.size)
    if data is None:
        return None
    digest = Digest(entry)
    digest.update(data)
    return data if digest.right else None


def private_dir(dest: str) -> str:
    """Where this collection keeps what it knows of a destination."""
    return os.path.join(os.path.abspath(dest), PRIVATE_DIR)


def progress_of(dest: str) -> str:
    """How far the run is that works on a destination, in words."""
    return fetch.describe(read_json(os.path.join(private_dir(dest), "progress.json")))


def ensure(request: Request) -> Outcome:
    """Bring the destination to what is asked for."""
    try:
        return Checkpoint(request).ensure()
    except StoppedError as error:
        raise fetch.FetchError("Stopped from outside; what has been fetched is kept, run again to go on.") from error
