# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

DOCUMENTATION = r"""
module: rank_service
short_description: Write the files of one rank as one set, and enable its unit
version_added: "1.0.0"
description:
  - Writes the unit, the rank agent, its configuration and its secrets as one set, each by a
    temporary name and a rename.
  - The digest over the whole set goes into a file of its own. The rank agent reads it at its start and tells it in its
    status, so that a later run can say whether the running group was started from these files.
  - Reloads systemd when the unit changed and enables the unit. It never starts, stops or restarts anything.
  - When the unit is refused by C(systemd-analyze verify) nothing at all is written.
author:
  - The baremetal.kimi_k3 authors (@baremetal-kimi-k3)
attributes:
  check_mode:
    description: Can run in C(check_mode) and say what it would write, also on a host that has nothing yet.
    support: full
  diff_mode:
    description: Returns the difference of every file; of O(secrets) only that they change.
    support: full
  idempotent:
    description: Two runs in a row leave the host alike; the second reports no change.
    support: full
  platform:
    description: Systems on which the module runs.
    support: full
    platforms: posix
options:
  unit:
    description: The name of the systemd unit; its file is one of O(files).
    type: str
    default: kimi-k3.service
  files:
    description: The set. Directories that are missing are made with mode C(0755), owned by root.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Where the file goes, absolute.
        type: path
        required: true
      content:
        description: The whole text of the file, written as UTF-8.
        type: str
        required: true
      mode:
        description: Permission bits, octal, as a string.
        type: str
        default: "0644"
      brief:
        description: Whether a difference shows the SHA-256 of the file in place of its text, for programs.
        type: bool
        default: false
  secrets:
    description:
      - Files of the set whose content never shows up in a log, a result or a difference.
      - They belong to root and have mode C(0600).
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Where the file goes, absolute.
        type: path
        required: true
      content:
        description: The whole text of the file, written as UTF-8.
        type: str
        required: true
  absent:
    description: Files of an earlier configuration that must not be there, absolute.
    type: list
    elements: path
    default: []
  digest_file:
    description: Where the digest of the set goes.
    type: path
    default: /etc/kimi-k3/digest
  enabled:
    description: Whether the unit starts at boot.
    type: bool
    default: true
seealso:
  - module: baremetal.kimi_k3.rank_info
"""

EXAMPLES = r"""
- name: Install the unit of a rank
  baremetal.kimi_k3.rank_service:
    unit: kimi-k3.service
    files:
      - path: /etc/systemd/system/kimi-k3.service
        content: "{{ lookup('ansible.builtin.template', 'kimi-k3.service.j2') }}"
    secrets:
      - path: /etc/kimi-k3/group.secret
        content: "{{ serve_group_secret }}"
"""

RETURN = r"""
digest:
  description: SHA-256 over path, mode and content of every file of the set.
  returned: success
  type: str
  sample: 5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef
written:
  description: The paths that were, or in check mode would be, written or removed.
  returned: success
  type: list
  elements: str
  sample: ["/etc/systemd/system/kimi-k3.service"]
"""

import hashlib
import os
import re
import stat
import tempfile
import typing as t

from ansible.module_utils.basic import AnsibleModule


class File(t.NamedTuple):
    """One file of the set as it shall be."""

    path: str
    content: bytes
    mode: int
    secret: bool
    brief: bool = False


def parse_files(entries: list[dict[str, t.Any]], secrets: list[dict[str, t.Any]]) -> list[File]:
    """The set from the module's options. Raises ValueError with one sentence for what cannot be."""
    files = []
    for entry, secret in [(e, False) for e in entries] + [(e, True) for e in secrets]:
        path, mode = entry["path"], "0600" if secret else str(entry["mode"])
        if not os.path.isabs(path) or os.path.normpath(path) != path:
            raise ValueError(f"'{path}' is no absolute, plain path.")
        if not re.fullmatch(r"0?[0-7]{3}", mode):
            raise ValueError(f"The mode '{mode}' of {path} is no octal number such as '0644'.")
        files.append(File(path, entry["content"].encode("utf-8"), int(mode, 8), secret, bool(entry.get("brief"))))
    doubled = {file.path for file in files if sum(other.path == file.path for other in files) > 1}
    if doubled:
        raise ValueError(f"{', '.join(sorted(doubled))} is in the set twice.")
    return files


def set_digest(files: list[File]) -> str:
    """SHA-256 hex over the set, independent of its order; lengths are hashed too, so that no two sets run together."""
    total = hashlib.sha256()
    for file in sorted(files):
        for part in (file.path.encode(), f"{file.mode:o}".encode(), file.content):
            total.update(len(part).to_bytes(8, "big"))
            total.update(part)
    return total.hexdigest()


def read(path: str) -> tuple[bytes, int] | None:
    """Content and permission bits of a regular file, None when there is none."""
    try:
        with open(path, "rb") as file:
            return file.read(), stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except FileNotFoundError:
        return None


def write(file: File) -> None:
    """Put the file in place by rename: a reader sees the old content or the new, never a part."""
    folder = os.path.dirname(file.path)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(file.path)}.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(file.content)
            stream.flush()
            os.fchmod(stream.fileno(), file.mode)
            os.fchown(stream.fileno(), 0, 0) if os.geteuid() == 0 else None
            os.fsync(stream.fileno())
        os.rename(temporary, file.path)
    except BaseException:
        os.unlink(temporary)
        raise
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def difference(file: File, before: tuple[bytes, int] | None) -> dict[str, str]:
    """One entry of the module's diff; a secret shows only that it changes."""
    entry = {"before_header": file.path, "after_header": file.path}
    if file.secret:
        return {**entry, "before": "(secret)\n" if before else "", "after": "(another secret)\n"}
    if file.brief:
        for key, content in (("before", before[0] if before else None), ("after", file.content)):
            entry[key] = "" if content is None else f"sha256: {hashlib.sha256(content).hexdigest()}\n"
    else:
        entry["before"] = before[0].decode("utf-8", "replace") if before else ""
        entry["after"] = file.content.decode("utf-8")
    if before and before[0] == file.content:
        return {**entry, "before": f"mode: {before[1]:04o}\n", "after": f"mode: {file.mode:04o}\n"}
    return entry


def verify_unit(module: AnsibleModule, files: list[File]) -> None:
    """Ask systemd whether it takes the unit before anything is written; hosts without the tool skip this."""
    unit = next((file for file in files if os.path.basename(file.path) == module.params["unit"]), None)
    tool = module.get_bin_path("systemd-analyze")
    if unit is None or tool is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, module.params["unit"])
        # The commands of a first installation do not exist yet: the syntax is what is asked about.
        text = re.sub(rb"(?m)^(Exec\w+)=.*$", rb"\1=/bin/true", unit.content)
        with open(path, "wb") as stream:
            stream.write(text)
        rc, out, err = module.run_command([tool, "verify", "--man=no", "--recursive-errors=no", path])
    # Debian 12's systemd exits 0 with "Unknown key name" lines for misspelt settings: the words decide as well.
    complaints = [line for line in (out + err).splitlines() if module.params["unit"] in line]
    if rc != 0 or complaints:
        told = "; ".join(complaints) or (out + err).strip()
        told = told.replace(path, unit.path)
        module.fail_json(msg=f"systemd does not take the unit {module.params['unit']}, nothing was written: {told}")


def is_enabled(module: AnsibleModule) -> bool:
    rc, out, _err = module.run_command(["systemctl", "is-enabled", "--", module.params["unit"]])
    return rc == 0 and out.strip() == "enabled"


def is_unread(module: AnsibleModule) -> bool:
    """Whether systemd has the unit in memory as it was before: a run may have ended between writing and reloading."""
    words = ["systemctl", "show", "--property", "NeedDaemonReload", "--value", "--", module.params["unit"]]
    rc, out, _err = module.run_command(words)
    return rc == 0 and out.strip() == "yes"


def systemctl(module: AnsibleModule, *words: str) -> None:
    rc, out, err = module.run_command(["systemctl", *words])
    if rc != 0:
        module.fail_json(msg=f"'systemctl {' '.join(words)}' failed: {(err or out).strip()}")


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "default": "kimi-k3.service"},
            "files": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "path": {"type": "path", "required": True},
                    "content": {"type": "str", "required": True},
                    "mode": {"type": "str", "default": "0644"},
                    "brief": {"type": "bool", "default": False},
                },
            },
            "secrets": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "no_log": False,
                "options": {
                    "path": {"type": "path", "required": True},
                    "content": {"type": "str", "required": True, "no_log": True},
                },
            },
            "absent": {"type": "list", "elements": "path", "default": []},
            "digest_file": {"type": "path", "default": "/etc/kimi-k3/digest"},
            "enabled": {"type": "bool", "default": True},
        },
        supports_check_mode=True,
    )
    try:
        files = parse_files(module.params["files"], module.params["secrets"])
    except ValueError as error:
        module.fail_json(msg=str(error))
    digest = set_digest(files)
    # Written last: a run that is cut off leaves the old one, and the next run sees a difference.
    record = File(module.params["digest_file"], f"{digest}\n".encode(), 0o644, False)

    diffs, written = [], []
    for file in [*files, record]:
        before = read(file.path)
        if before != (file.content, file.mode):
            written.append(file)
            diffs.append(difference(file, before))
    removed = [path for path in module.params["absent"] if os.path.lexists(path)]
    reload = any(os.path.basename(file.path) == module.params["unit"] for file in written)
    if reload:
        verify_unit(module, files)
    reload = reload or is_unread(module)
    toggle = is_enabled(module) != module.params["enabled"]

    if not module.check_mode:
        for file in written:
            if file is not record:
                write(file)
        for path in removed:
            os.unlink(path)
        if reload:
            systemctl(module, "daemon-reload")
        if record in written:
            write(record)
        if toggle:
            systemctl(module, "enable" if module.params["enabled"] else "disable", "--", module.params["unit"])
    if toggle:
        state = {True: "enabled\n", False: "disabled\n"}
        name = f"{module.params['unit']} at boot"
        diffs.append(
            {
                "before_header": name,
                "after_header": name,
                "before": state[not module.params["enabled"]],
                "after": state[module.params["enabled"]],
            }
        )
    module.exit_json(
        changed=bool(written or removed or toggle or reload),
        digest=digest,
        written=[file.path for file in written] + removed,
        diff=diffs,
    )


if __name__ == "__main__":
    main()
