# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: hf_checkpoint
short_description: Hold a checkpoint of the Hugging Face Hub in a directory, proven byte by byte
version_added: "1.0.0"
description:
  - Brings a directory to hold one pinned revision of a model repository, or of it what one pipeline stage needs.
  - Many files are fetched at once, one connection each. SHA-256 is computed as the bytes arrive, and a file gets its
    name only when its size and its digest are those of the Hub's listing and its data is on the disk.
  - A fetch that was interrupted goes on where it stopped, within a file too, after hashing once more what is there.
  - Every proven file has a receipt of its size, times, inode, blocks and digest. A later run that finds all receipts
    to be true needs neither the network nor the bytes.
  - Files that another tool has put there are hashed once and kept when they are right. A wrong file is replaced only
    when the right one is there, and is then kept in C(.kimi-k3/bad) below O(dest).
  - Nothing that is right is ever removed, unless O(keep_revisions) says so of a whole revision. Files that the plan
    does not name are left alone.
  - The module needs nothing but Python on the host.
author:
  - The baremetal.kimi_k3 authors (@baremetal-kimi-k3)
extends_documentation_fragment:
  - baremetal.kimi_k3.attributes
  - baremetal.kimi_k3.attributes.actiongroup
attributes:
  check_mode:
    support: full
    details:
      - Reads the listing and the index from the Hub unless they are there already, hashes what a run would have to
        hash, and writes nothing.
  diff_mode:
    support: full
    details:
      - Shows the plan before and after, with the names and sizes of the files to hold.
  idempotent:
    support: full
options:
  repository:
    description: The model repository, as in V(moonshotai/Kimi-K3).
    type: str
    required: true
  revision:
    description:
      - The commit to hold, 40 hexadecimal digits.
      - Names of branches and tags are refused, since they may mean something else on the next host or tomorrow.
    type: str
    required: true
  dest:
    description:
      - The directory that will hold the files. It and its parents are created when they are absent.
      - It should be used for one revision only.
    type: path
    required: true
  endpoint:
    description:
      - URL of the Hub or of a mirror that answers like it.
      - The default is the environment variable E(HF_ENDPOINT) of the host, or else V(https://huggingface.co).
    type: str
  mirrors:
    description:
      - URLs of servers that answer like the Hub and are asked for the bytes of files before O(endpoint) is, in this
        order. One that fails is passed over for that file.
      - The listing, and so every digest, comes from O(endpoint) alone. No token is sent to a mirror.
    type: list
    elements: str
    default: []
  source:
    description:
      - With V(hub), what is missing is fetched.
      - With V(present), nobody is asked for anything. The files are proven as they are, and the module fails when one
        of them is absent or wrong. For hosts without any way out, and for looking only.
      - No file is then fetched, linked to another revision, or removed, whatever O(keep_revisions) says. Written are
        only the notes in C(.kimi-k3), C(checkpoint.json), and the index where it is not the one of this plan.
      - When a file is found to be absent or wrong, C(checkpoint.json) is removed, also with V(present), so that nothing
        goes on saying that the directory is proven. A run that finds or makes everything right writes it again. An
        engine that runs does not need it.
    type: str
    choices: [hub, present]
    default: hub
  listing_file:
    description:
      - A file on the host with the answer of the Hub to C(/api/models/REPOSITORY/tree/REVISION?recursive=true), to be
        used in place of asking for it. Needed once with O(source=present) when C(.kimi-k3) did not come with the files.
    type: path
  scope:
    description:
      - With V(all), all files of the revision.
      - With V(stage), of the files with weights only those with tensors that O(stages) need, and all other files.
        C(model.safetensors.index.json) then names just the files that are there, which the engine insists on; the
        repository's own index is kept in C(.kimi-k3).
    type: str
    choices: [all, stage]
    default: all
  pipeline_layers:
    description:
      - How many layers of the model each pipeline stage runs, in order, as in V([47, 46]).
      - Required with O(scope=stage).
    type: list
    elements: int
  stages:
    description:
      - The pipeline stages, counted from 0, that this host runs. None named means every stage.
      - Used with O(scope=stage) only.
    type: list
    elements: int
  layers:
    description: The number of layers of the model. When given, O(pipeline_layers) must sum to it.
    type: int
  language_model_only:
    description:
      - Leave out the tensors of the vision tower and its projector, as the engine does with
        C(--language-model-only). Otherwise every stage holds them.
      - Used with O(scope=stage) only.
    type: bool
    default: false
  token_file:
    description:
      - A file on the host with an access token of the Hub on its only line, for repositories that are gated or
        private.
      - The token is sent to the host of O(endpoint) and to no other, whatever redirects say.
    type: path
  ca_path:
    description: A file on the host with certificates of authorities to trust, for a mirror with its own authority.
    type: path
  connections:
    description: Number of files that are fetched at once to begin with, each over one connection.
    type: int
    default: 8
  max_connections:
    description:
      - Most files to fetch at once. Connections are added one by one as long as one more brings more bytes, and halved
        when the rate stays below a quarter of the best one for a minute.
      - Not more than O(connections) means that none is added.
    type: int
    default: 32
  rate_limit:
    description: Most bytes per second to fetch, over all connections together. V(0) means no limit.
    type: int
    default: 0
  min_rate:
    description:
      - Bytes per second below which a connection is given up and a new one is made, measured over
        O(min_rate_seconds) of waiting for bytes. V(0) means no floor.
    type: int
    default: 16384
  min_rate_seconds:
    description: Seconds over which O(min_rate) is measured.
    type: int
    default: 30
  timeout:
    description: Seconds without a single byte, or without an answer, after which a connection is given up.
    type: int
    default: 30
  retries:
    description:
      - How often to try again in a row when a connection fails or the server is busy, with growing waits in between.
        A connection that has brought bytes starts the count anew.
      - When the server says how long to wait, that is how long the module waits.
    type: int
    default: 8
  verify:
    description:
      - How to prove files that were proven before. With O(shared), hosts that run at the same time hash a part each.
      - With V(receipt), by their receipts; a file is hashed again when anything about it has changed, and when its
        receipt is about another revision that was in O(dest).
      - With V(rolling), by their receipts, and of those by hashing the ones that were hashed longest ago, until
        O(verify_seconds) or O(verify_bytes) are used up. In this way every byte is read again over a number of runs.
      - With V(full), by hashing all of them, on all cores, also those that are taken over from another revision. The
        bytes are read from the disk, not from memory, where the file system can do that.
    type: str
    choices: [receipt, rolling, full]
    default: receipt
  verify_seconds:
    description:
      - Seconds after which O(verify=rolling) reads no further. Files that it is in the middle of are then left to the
        next run, all but the one whose turn was first. V(0) means no limit.
    type: int
    default: 60
  verify_bytes:
    description: Bytes after which O(verify=rolling) begins no other file. V(0) means no limit.
    type: int
    default: 0
  assumed_rate:
    description: Bytes per second from which check mode works out how long the fetch would take.
    type: int
    default: 300000000
  lock_timeout:
    description:
      - Seconds to wait for another run with the same O(dest) to end, as one that goes on after its controller was
        interrupted. What it has fetched need not be fetched again.
    type: int
    default: 3600
  shared:
    description:
      - Other hosts see the same O(dest) on a shared file system and run this module at the same time. One of them
        fetches, the others wait, help it to hash what has to be hashed, and take over its work when it is gone.
      - Nothing is asked of the file system but that renaming a file is done once, by one of two hosts. Where O(dest) is
        not shared after all, every host does all the work in its own.
      - All hosts have to say so, and to hold the same. With O(scope=stage), O(stages) has to be empty, since there is
        one index for all of them.
    type: bool
    default: false
  shared_timeout:
    description:
      - Seconds of silence after which the host that does the work is taken for gone, by the clock of the one that
        waits. To be longer than the shared file system is ever silent itself.
      - While it is heard of, it is waited for without limit.
    type: int
    default: 60
  allow_tmpfs:
    description: Accept a O(dest) in memory, which is otherwise refused.
    type: bool
    default: false
  keep_revisions:
    description:
      - How many revisions of O(repository) to keep in the directory that O(dest) is in, the one in O(dest) counted.
        V(0) keeps all. Older ones are removed, when everything in O(dest) is proven.
      - A revision is a directory with the name of a commit in which this module has put that commit of O(repository).
        O(dest) must be named so, too. Nothing else is ever removed.
      - One that a process uses, or that a file of O(protect) names, is left for a later run.
      - Files that two revisions have in common are held once, as hard links, whatever this option says.
    type: int
    default: 0
  protect:
    description: Files on the host, as the configuration of an engine. The revisions whose paths they name are kept.
    type: list
    elements: path
    default: []
  exchange:
    description:
      - Give files to another host that runs this module at the same time, and take from it what it has, so that each
        byte that both need comes from outside once. What the other host cannot give comes from O(endpoint).
      - The module listens for the other host while it works, and until the other one is done or has been silent for
        O(exchange.timeout). The bytes are not encrypted on their way; they are proven like all others.
    type: dict
    suboptions:
      address:
        description: This host's address on the network between the hosts.
        type: str
        required: true
      peer:
        description: The other host's address there.
        type: str
        required: true
      port:
        description: The TCP port on both hosts.
        type: int
        default: 29551
      token:
        description: A secret, the same on both hosts, that lets no stranger in. To be made up for each run.
        type: str
        required: true
      first:
        description: Whether this is the first of the two. It begins at the start of the list, the other at the end.
        type: bool
        required: true
      timeout:
        description: Seconds of silence after which the other host is taken for gone.
        type: int
        default: 60
  defer:
    description:
      - When there is anything to do, do not do it, but return RV(pending) as true.
      - Has no effect in check mode.
    type: bool
    default: false
  detach:
    description:
      - Let work that takes longer go on in a process of its own on the host when the controller or its connection is
        gone. The next run with the same options attaches to it.
      - To end it, end the process that C(.kimi-k3/progress.json) names. What it has fetched is kept.
      - Without it, and with C(async), the work ends with the task.
    type: bool
    default: true
  _progress:
    description:
      - For the action plugin of this module, which follows a run to tell how far it is.
      - Not to be set in playbooks.
    type: dict
seealso:
  - plugin: baremetal.kimi_k3.checkpoint_plan
    plugin_type: filter
"""

EXAMPLES = r"""
- name: Hold the first pipeline stage of Kimi K3
  baremetal.kimi_k3.hf_checkpoint:
    repository: moonshotai/Kimi-K3
    revision: f831ab66814297da540d832a5235f8e904f29d06
    dest: /srv/kimi-k3/moonshotai--Kimi-K3/f831ab66814297da540d832a5235f8e904f29d06
    scope: stage
    pipeline_layers: [47, 46]
    stages: [0]
    language_model_only: true

- name: Hold all of it, from a mirror, and hash every byte again
  baremetal.kimi_k3.hf_checkpoint:
    repository: moonshotai/Kimi-K3
    revision: f831ab66814297da540d832a5235f8e904f29d06
    dest: /srv/kimi-k3/full
    endpoint: https://hub.example.com
    verify: full
"""

RETURN = r"""
path:
  description: The directory with the files.
  returned: success
  type: str
  sample: /srv/kimi-k3/moonshotai--Kimi-K3/f831ab66814297da540d832a5235f8e904f29d06
repository:
  description: The repository.
  returned: success
  type: str
  sample: moonshotai/Kimi-K3
revision:
  description: The commit.
  returned: success
  type: str
  sample: f831ab66814297da540d832a5235f8e904f29d06
files:
  description: Number of files of the plan, without the index.
  returned: success
  type: int
  sample: 70
bytes:
  description: Bytes of all files of the plan.
  returned: success
  type: int
  sample: 783900000000
fetch:
  description: Names of the files that were fetched, or in check mode would be.
  returned: success
  type: list
  elements: str
  sample: [config.json, model-00001-of-000096.safetensors]
fetched_bytes:
  description: Bytes that came over the network in this run, or in check mode would.
  returned: success
  type: int
  sample: 2341000000
estimated_seconds:
  description: Seconds that the bytes would take at O(assumed_rate).
  returned: in check mode
  type: int
  sample: 2613
assumed_rate:
  description: As the option of this name.
  returned: in check mode
  type: int
  sample: 300000000
peer_bytes:
  description: How many of RV(fetched_bytes) came from the other host of O(exchange).
  returned: success
  type: int
  sample: 1000000
pending:
  description: There is something to do, which O(defer) put off. Nothing else is returned then.
  returned: when O(defer) is true
  type: bool
  sample: false
resumed_bytes:
  description: Bytes that an interrupted run had fetched and that were used.
  returned: success
  type: int
  sample: 1073741824
hashed:
  description: Names of the files that were there and were hashed in this run.
  returned: success
  type: list
  elements: str
  sample: [model-00001-of-000096.safetensors]
replaced:
  description: Names of the files that were there, were not as listed, and were replaced.
  returned: success
  type: list
  elements: str
  sample: [model-00002-of-000096.safetensors]
linked:
  description: Names of the files that another revision had already, and that are hard links to those.
  returned: success
  type: list
  elements: str
  sample: [tokenizer.model]
removed:
  description: Directories of the revisions that were removed, or in check mode would be.
  returned: success
  type: list
  elements: str
  sample: []
verified:
  description:
    - How the files are proven. V(sha256) means that every byte was hashed in this run; V(receipt) comes with the time
      at which the oldest of them was. With O(shared), it says which part other hosts had in it.
  returned: success
  type: str
  sample: receipt (hashed 2026-11-29T10:02:00Z)
shared:
  description: As O(shared).
  returned: success
  type: bool
  sample: false
plan:
  description: What was selected from the repository.
  returned: success
  type: dict
  contains:
    scope:
      description: As O(scope).
      type: str
      sample: stage
    stages:
      description: The pipeline stages whose tensors are held.
      type: list
      elements: int
      sample: [0]
    pipeline_layers:
      description: As O(pipeline_layers).
      type: list
      elements: int
      sample: [47, 46]
    layers:
      description: First and last layer of each of the stages.
      type: list
      elements: list
      sample: [[0, 46]]
    language_model_only:
      description: As O(language_model_only).
      type: bool
      sample: true
    tied_embeddings:
      description: Whether the embeddings are the model's head too, so that the last stage holds them as well.
      type: bool
      sample: false
    tensors:
      description: Number of tensors the stages need.
      type: int
      sample: 248000
    vision_tensors:
      description: How many of them belong to the vision tower and its projector.
      type: int
      sample: 0
    weight_files:
      description: The files that hold these tensors.
      type: list
      elements: str
      sample: [model-00001-of-000096.safetensors]
    other_files:
      description: Number of the other files to hold.
      type: int
      sample: 22
    left_out:
      description: Number of files with weights that are not needed.
      type: int
      sample: 48
    unplaced:
      description: The first few tensors that belong to no known part of the model and are held by every stage.
      type: list
      elements: str
      sample: []
plan_digest:
  description: SHA-256 that stands for the files of the plan, their content, and the choice they follow from.
  returned: success
  type: str
  sample: a1c5210650ce71d2d3ae9ec5a101ac4afd3cf4b10091be589853437eb967febd
identity_digest:
  description: SHA-256 over what must be equal on all hosts of one replica, whichever stages each of them holds.
  returned: success
  type: str
  sample: 9710e121a58d03ac92c8d6da287a19541994319afbbe6d6202af001ffd379213
"""

import json
import math
import os
import re
import signal
import threading
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.background import (
    BackgroundError,
    Job,
    Tell,
    again,
    start,
)
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.checkpoint_job import (
    ERRORS,
    Checkpoint,
    Outcome,
    Request,
    ensure,
    private_dir,
    progress_of,
)
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.checkpoint_plan import digest_of
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.exchange import Exchange, Peer
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.fetch import FetchError, Options
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.hub import (
    DEFAULT_ENDPOINT,
    Hub,
    HubError,
    Nowhere,
    parse_token,
)
from ansible_collections.baremetal.kimi_k3.plugins.module_utils.storage import host_id

ARGUMENT_SPEC: dict[str, dict[str, Any]] = {
    "repository": {"type": "str", "required": True},
    "revision": {"type": "str", "required": True},
    "dest": {"type": "path", "required": True},
    "endpoint": {"type": "str"},
    "mirrors": {"type": "list", "elements": "str", "default": []},
    "source": {"type": "str", "choices": ["hub", "present"], "default": "hub"},
    "listing_file": {"type": "path"},
    "scope": {"type": "str", "choices": ["all", "stage"], "default": "all"},
    "pipeline_layers": {"type": "list", "elements": "int"},
    "stages": {"type": "list", "elements": "int"},
    "layers": {"type": "int"},
    "language_model_only": {"type": "bool", "default": False},
    "token_file": {"type": "path", "no_log": False},
    "ca_path": {"type": "path"},
    "connections": {"type": "int", "default": 8},
    "max_connections": {"type": "int", "default": 32},
    "rate_limit": {"type": "int", "default": 0},
    "min_rate": {"type": "int", "default": 16384},
    "min_rate_seconds": {"type": "int", "default": 30},
    "timeout": {"type": "int", "default": 30},
    "retries": {"type": "int", "default": 8},
    "verify": {"type": "str", "choices": ["receipt", "rolling", "full"], "default": "receipt"},
    "verify_seconds": {"type": "int", "default": 60},
    "verify_bytes": {"type": "int", "default": 0},
    "assumed_rate": {"type": "int", "default": 300_000_000},
    "lock_timeout": {"type": "int", "default": 3600},
    "shared": {"type": "bool", "default": False},
    "shared_timeout": {"type": "int", "default": 60},
    "allow_tmpfs": {"type": "bool", "default": False},
    "keep_revisions": {"type": "int", "default": 0},
    "protect": {"type": "list", "elements": "path", "default": []},
    "exchange": {
        "type": "dict",
        "options": {
            "address": {"type": "str", "required": True},
            "peer": {"type": "str", "required": True},
            "port": {"type": "int", "default": 29551},
            "token": {"type": "str", "required": True, "no_log": True},
            "first": {"type": "bool", "required": True},
            "timeout": {"type": "int", "default": 60},
        },
    },
    "defer": {"type": "bool", "default": False},
    "detach": {"type": "bool", "default": True},
    # From the action plugin: {slice, run}, seconds to follow and which run.
    "_progress": {"type": "dict"},
}
# Options that do not make it another piece of work.
_MANNER = frozenset({"_progress", "detach", "defer", "exchange", "lock_timeout", "assumed_rate"})
_AT_LEAST = {
    "connections": 1,
    "max_connections": 1,
    "verify_seconds": 0,
    "verify_bytes": 0,
    "assumed_rate": 1,
    "keep_revisions": 0,
    "rate_limit": 0,
    "min_rate": 0,
    "min_rate_seconds": 1,
    "timeout": 1,
    "retries": 0,
    "lock_timeout": 0,
    "shared_timeout": 1,
}
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_REVISION = re.compile(r"[0-9a-f]{40}")


def check_parameters(params: dict[str, Any]) -> str | None:
    """What is wrong with the options; nothing when nothing is."""
    if not _REPOSITORY.fullmatch(params["repository"]):
        return f"repository must be a name such as moonshotai/Kimi-K3, not {params['repository']!r}."
    if not _REVISION.fullmatch(params["revision"]):
        return (
            f"revision must be the 40 hexadecimal digits of a commit, not {params['revision']!r}: "
            "a branch or tag may mean another commit on the next host."
        )
    if not os.path.isabs(params["dest"]):
        return f"dest must be an absolute path, not {params['dest']!r}."
    for name, least in _AT_LEAST.items():
        if params[name] < least:
            return f"{name} must be {least} or more, not {params[name]}."
    if params["shared"]:
        return check_shared(params)
    if params["exchange"]:
        return check_exchange(params["exchange"])
    return None


def check_shared(params: dict[str, Any]) -> str | None:
    if params["exchange"]:
        return "exchange is for hosts with a dest each, and shared for hosts with one dest: set one of the two."
    if params["keep_revisions"]:
        return (
            "keep_revisions must be 0 with shared, since a host cannot see which revisions the others use: "
            "remove old ones by hand."
        )
    if params["scope"] == "stage" and params["stages"]:
        return (
            f"stages must be empty with shared, not {params['stages']}: one directory has one index, "
            "so it has to hold what all hosts need."
        )
    return None


def check_exchange(options: dict[str, Any]) -> str | None:
    places = {name: options[name].strip("[] ").lower() for name in ("address", "peer")}
    for name, place in places.items():
        if place in ("", "*", "0.0.0.0", "::"):  # noqa: S104  (refused)
            return f"exchange.{name} must be the address of one host, not {options[name]!r}."
    if places["address"] == places["peer"]:
        return f"exchange.address and exchange.peer are both {options['peer']}: a host cannot exchange with itself."
    if not 0 < options["port"] < 65536:
        return f"exchange.port must be a TCP port, 1 to 65535, not {options['port']}."
    if not options["token"] or not options["token"].isascii() or not options["token"].isprintable():
        return "exchange.token must be printable ASCII and not empty."
    if options["timeout"] < 1:
        return f"exchange.timeout must be 1 or more, not {options['timeout']}."
    return None


def read_token(path: str | None) -> tuple[str | None, list[str]]:
    """The token and what to warn of."""
    if path is None:
        return None, []
    try:
        with open(path, encoding="utf-8") as stream:
            token, remark = parse_token(stream.read(65536))
            shared = os.fstat(stream.fileno()).st_mode & 0o077
    except (OSError, ValueError) as error:
        raise HubError(f"token_file {path} cannot be read ({getattr(error, 'strerror', None) or error}).") from error
    except HubError as error:
        raise HubError(f"token_file {path} is of no use: {error}.") from error
    warnings = [f"token_file {path} {remark}."] if remark else []
    if shared:
        warnings.append(f"token_file {path} can be read by others than its owner: set its mode to 0600.")
    return token, warnings


def request_of(params: dict[str, Any], check: bool, token: str | None, stop: threading.Event) -> Request:
    """The module's options as the library wants them."""

    def server(url: str, secret: str | None) -> Hub:
        return Hub(
            url,
            params["repository"],
            params["revision"],
            token=secret,
            timeout=params["timeout"],
            retries=params["retries"],
            ca_path=params["ca_path"],
            stop=stop,
            min_rate=params["min_rate"],
            min_rate_seconds=params["min_rate_seconds"],
        )

    if params["source"] == "present":
        hub: Hub | Nowhere = Nowhere()
    else:
        hub = server(params["endpoint"] or os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT, token)
    exchange = params["exchange"]
    return Request(
        repository=params["repository"],
        revision=params["revision"],
        dest=params["dest"],
        scope=params["scope"],
        pipeline_layers=params["pipeline_layers"] or [],
        stages=params["stages"] or [],
        layers=params["layers"],
        language_model_only=params["language_model_only"],
        hub=hub,
        exchange=exchange_of(exchange, params["timeout"], stop) if exchange and not check else None,
        mirrors=[server(url, None) for url in params["mirrors"]] if params["source"] != "present" else [],
        listing_file=params["listing_file"],
        verify=params["verify"],
        verify_seconds=params["verify_seconds"],
        verify_bytes=params["verify_bytes"],
        options=Options(
            connections=params["connections"],
            max_connections=max(params["connections"], params["max_connections"]),
            retries=params["retries"],
            rate_limit=params["rate_limit"],
            min_rate=params["min_rate"],
            min_rate_seconds=params["min_rate_seconds"],
        ),
        lock_timeout=params["lock_timeout"],
        shared=params["shared"],
        shared_timeout=params["shared_timeout"],
        allow_tmpfs=params["allow_tmpfs"],
        keep_revisions=params["keep_revisions"],
        protect=params["protect"],
        check=check,
        stop=stop,
    )


def exchange_of(options: dict[str, Any], timeout: float, stop: threading.Event) -> Exchange:
    host = options["peer"].strip("[] ")
    host = f"[{host}]" if ":" in host else host
    peer = Peer(f"http://{host}:{options['port']}", options["token"], timeout=timeout, stop=stop)
    return Exchange(
        peer,
        address=options["address"].strip("[] "),
        port=options["port"],
        token=options["token"],
        first=options["first"],
        timeout=options["timeout"],
        stop=stop,
    )


def result_of(request: Request, outcome: Outcome) -> dict[str, Any]:
    """What the module returns."""
    return {
        "changed": outcome.changed,
        "path": request.dest,
        "repository": request.repository,
        "revision": request.revision,
        "files": len(outcome.plan.entries),
        "bytes": outcome.plan.size,
        "fetch": outcome.fetch,
        "fetched_bytes": outcome.fetched_bytes,
        "peer_bytes": outcome.peer_bytes,
        "resumed_bytes": outcome.resumed_bytes,
        "hashed": outcome.hashed,
        "replaced": outcome.replaced,
        "linked": outcome.linked,
        "removed": outcome.removed,
        "verified": outcome.verified,
        "shared": request.shared,
        "plan": outcome.plan.summary,
        "plan_digest": outcome.plan.plan_digest,
        "identity_digest": outcome.plan.identity_digest,
    }


def diff_of(outcome: Outcome, dest: str) -> dict[str, str]:
    """The plan before and after, for people."""

    def text(value: dict[str, Any]) -> str:
        return json.dumps(value, indent=2) + "\n" if value else ""

    header = f"{dest} (plan)"
    return {
        "before_header": header,
        "after_header": header,
        "before": text(outcome.before),
        "after": text(outcome.after),
    }


def stop_on_signals(stop: threading.Event, *numbers: signal.Signals) -> None:
    """Let a run that is told to end keep what it has."""

    def handler(number: int, _frame: Any) -> None:
        stop.set()
        raise FetchError(
            f"Stopped by {signal.Signals(number).name}; what has been fetched is kept, run again to go on."
        )

    for number in numbers:
        signal.signal(number, handler)


def work(params: dict[str, Any], request: Request, diff: bool) -> dict[str, Any]:
    """All of it; the module's result, with warnings as C(_warnings)."""
    try:
        outcome = ensure(request)
    except ERRORS as error:
        return {"failed": True, "msg": str(error)}
    except OSError as error:
        return {"failed": True, "msg": f"{error.filename or params['dest']}: {error.strerror or error}."}
    return finished(params, request, outcome, diff)


def finished(params: dict[str, Any], request: Request, outcome: Outcome, diff: bool) -> dict[str, Any]:
    result = {**result_of(request, outcome), "_warnings": outcome.warnings}
    if request.check:
        result["assumed_rate"] = params["assumed_rate"]
        result["estimated_seconds"] = math.ceil(outcome.fetched_bytes / params["assumed_rate"])
    if diff:
        result["diff"] = diff_of(outcome, request.dest)
    return result


def job_of(params: dict[str, Any]) -> Job:
    """The work's name: the same for the same options on the same host."""
    name = digest_of({**{key: value for key, value in params.items() if key not in _MANNER}, "host": host_id()})[:12]
    return Job(os.path.join(private_dir(params["dest"]), "runs"), name)


def follow(params: dict[str, Any], request: Request, diff: bool) -> dict[str, Any]:
    """The result of work in the background, or how far it is when the time for this look is over."""
    progress = params["_progress"]
    job = job_of(params)
    try:
        if progress.get("run"):
            run = again(job, progress["run"])
        else:
            checkpoint = Checkpoint(request)
            outcome = None if request.exchange else checkpoint.at_once()
            if outcome is not None:
                return finished(params, request, outcome, diff)
            checkpoint.prepare()

            def background(tell: Tell) -> dict[str, Any]:
                stop_on_signals(request.stop, signal.SIGTERM, signal.SIGINT)
                request.tell = tell
                return work(params, request, diff)

            run = start(job, background)
        status = run.follow(float(progress.get("slice", 0)))
    except (*ERRORS, BackgroundError) as error:
        return {"failed": True, "msg": str(error)}
    if status is not None:
        return status["result"]
    return {
        "changed": False,
        "_running": {
            "run": run.ident,
            "text": run.state() or progress_of(params["dest"]),
            "attached": run.attached,
            "pid": run.pid,
        },
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec=ARGUMENT_SPEC,
        required_if=[("scope", "stage", ["pipeline_layers"])],
        supports_check_mode=True,
    )
    problem = check_parameters(module.params)
    if problem:
        module.fail_json(msg=problem)
    stop = threading.Event()
    try:
        token, warnings = read_token(module.params["token_file"])
        request = request_of(module.params, module.check_mode, token, stop)
    except ERRORS as error:
        module.fail_json(msg=str(error))
    try:
        if module.params["defer"] and not module.check_mode:
            outcome = Checkpoint(request).at_once()
            result = finished(module.params, request, outcome, module._diff) if outcome else {"changed": False}
            result["pending"] = outcome is None
        elif module.params["_progress"] and module.params["detach"] and not module.check_mode:
            result = follow(module.params, request, module._diff)
        else:
            stop_on_signals(stop, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            result = work(module.params, request, module._diff)
    except ERRORS as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.filename or module.params['dest']}: {error.strerror or error}.")
    for warning in [*(warnings if "_running" not in result else []), *result.pop("_warnings", [])]:
        module.warn(warning)
    if result.get("failed"):
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
