# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From variables to the effective command of one rank: pure functions, no I/O.

Words as vLLM uses them: a I(host) is one machine of the replica and runs one node rank; world size here is the number
of hosts; a global rank is one GPU. Host r holds the global ranks [r * L, (r + 1) * L) with L = TP * PP / hosts, and a
pipeline stage is the global rank divided by TP (vLLM 0.27 to 0.32, config/parallel.py).
"""

from __future__ import annotations

import ipaddress
import json
import re
import typing as t

# Flags that differ between ranks by design; everything else must be equal on all of them.
RANK_FLAGS = frozenset({"node-rank", "host", "port", "headless"})
# Environment that names a host's own address, interface or devices.
RANK_ENVIRONMENT = frozenset(
    {"VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"}
)
# Flags the role computes from the shape of the world; naming them in serve_args would contradict it.
WORLD_FLAGS = frozenset(
    {
        "tensor-parallel-size",
        "tp",
        "pipeline-parallel-size",
        "pp",
        "nnodes",
        "n",
        "node-rank",
        "r",
        "master-addr",
        "master-port",
        "headless",
        "host",
        "port",
        "served-model-name",
        "model",
        "api-key",
    }
)
# The agent and wait_for_model ask rank 0 by plain HTTP at serve_api_host and serve_api_port.
ENTRANCE_FLAGS = frozenset({"ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "uds"})


# Names of environment variables whose values are nobody's to read.
_SECRET_NAME = re.compile(r"(^|_)(API_KEY|ACCESS_KEY|PRIVATE_KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$", re.IGNORECASE)
# What the unit hides from the engine, and the settings of [Service] by which an operator may open it again.
_HIDDEN = {"ProtectHome": ("/home", "/root", "/run/user"), "PrivateTmp": ("/tmp", "/var/tmp")}  # noqa: S108
_OPENED_BY = frozenset({"BindPaths", "BindReadOnlyPaths"})
_SHORTEST_KEY = 8  # characters; a shorter one would be taken out of places where it stands by chance


class LaunchError(ValueError):
    """The variables contradict each other; the message is one sentence for the operator."""


def parse_release(version: str) -> tuple[int, ...]:
    """The numeric release of a version string: C(0.32.0+cpu) gives (0, 32, 0)."""
    match = re.match(r"\s*v?(\d+(?:\.\d+)*)", str(version))
    if not match:
        raise LaunchError(f"'{version}' is no version number: expected something like 0.32.0.")
    return tuple(int(part) for part in match.group(1).split("."))


def rank_stages(rank: int, tensor_parallel: int, pipeline_parallel: int, hosts: int) -> list[int]:
    """The pipeline stages that host number C(rank) holds, ascending.

    Raises LaunchError when the shape does not divide over the hosts or the rank lies outside it.
    """
    for name, value in (
        ("tensor parallel", tensor_parallel),
        ("pipeline parallel", pipeline_parallel),
        ("host", hosts),
    ):
        if value < 1:
            raise LaunchError(f"The {name} count is {value}: it must be at least 1.")
    world = tensor_parallel * pipeline_parallel
    if world % hosts:
        raise LaunchError(
            f"Tensor parallel {tensor_parallel} times pipeline parallel {pipeline_parallel} is {world} GPUs, "
            f"which does not divide over {hosts} hosts."
        )
    if not 0 <= rank < hosts:
        raise LaunchError(f"Rank {rank} does not exist in a group of {hosts} hosts (0 to {hosts - 1}).")
    local = world // hosts
    return sorted({gpu // tensor_parallel for gpu in range(rank * local, (rank + 1) * local)})


def hosts_by_rank(hosts: t.Iterable[str], variables: t.Mapping[str, t.Mapping[str, t.Any]]) -> list[str]:
    """The hosts in the order of their serve_rank; C(variables) maps a host to its variables."""
    ranks = {host: variables[host].get("serve_rank") for host in hosts}
    return sorted((host for host, rank in ranks.items() if rank is not None), key=lambda host: int(ranks[host]))


def applicable_environment(
    environment: t.Mapping[str, t.Any], version: str, releases: t.Mapping[str, t.Mapping[str, str]]
) -> dict[str, str]:
    """The variables that this vLLM release knows, as strings.

    C(releases) maps a variable to C(since) and C(before) (versions, either may be missing) or to C(only), a list of
    exact version strings. vLLM warns of variables it does not know, and refuses them when told to validate.
    A value of None leaves the variable out.
    """
    release = parse_release(version)
    result = {}
    for name, value in environment.items():
        if value is None:
            continue
        known = releases.get(name, {})
        if "only" in known and str(version) not in known["only"]:
            continue
        if "since" in known and release < parse_release(known["since"]):
            continue
        if "before" in known and release >= parse_release(known["before"]):
            continue
        result[name] = _word(value)
    return result


def _word(value: t.Any) -> str:
    """One command-line or environment word: booleans as vLLM's environment reads them, mappings as JSON."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, (dict, list)):
        return json.dumps(value, separators=(",", ":"), sort_keys=False)
    return str(value)


def flag_words(args: t.Mapping[str, t.Any]) -> list[str]:
    """A dictionary of flags as command-line words, in its order.

    True gives the bare flag, False and None leave it out, a list gives the flag once followed by its items,
    a mapping gives JSON, anything else its text.
    """
    words: list[str] = []
    for name, value in args.items():
        if value is None or value is False:
            continue
        words.append(f"--{name}")
        if value is True:
            continue
        if isinstance(value, list):
            words.extend(_word(item) for item in value)
        else:
            words.append(_word(value))
    return words


def normalise_flag(name: str) -> str:
    """The name vLLM's parser knows: without leading dashes, words joined by dashes."""
    return str(name).lstrip("-").replace("_", "-")


def launch_errors(args: t.Mapping[str, t.Any], environment: t.Mapping[str, t.Any]) -> list[str]:
    """What cannot be given to vLLM as it stands: flags the role computes, what no command or environment can hold."""
    for name, given in (("serve_args", args), ("serve_environment", environment)):
        if not isinstance(given, dict):
            raise LaunchError(f"{name} is a {type(given).__name__}: it must be a dictionary.")
    errors = []
    names: dict[str, str] = {}
    for name, value in args.items():
        flag = normalise_flag(name)
        if flag.removeprefix("no-") in WORLD_FLAGS:
            errors.append(
                f"serve_args names '{name}', which the role computes: set the serve_* variable for it instead."
            )
        elif flag in ENTRANCE_FLAGS:
            errors.append(
                f"serve_args names '{name}', but rank 0 is asked for proofs of life by plain HTTP at serve_api_port: "
                "leave it out, and put a proxy before the API."
            )
        elif not re.fullmatch(r"[A-Za-z][A-Za-z0-9.-]*", flag):
            errors.append(
                f"'{printable(name)}' in serve_args is no flag: write its name alone, and its value behind the colon."
            )
        elif flag in names:
            errors.append(f"serve_args names '{names[flag]}' and '{name}', which are one flag: leave one out.")
        elif not _sayable(value):
            errors.append(f"The value of {name} in serve_args has characters that no command line can hold.")
        names.setdefault(flag, str(name))
    for name, value in environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            errors.append(f"'{printable(name)}' in serve_environment is no name of an environment variable.")
        elif value is not None and _SECRET_NAME.search(str(name)):
            errors.append(
                f"serve_environment names {name}, which looks like a secret, and everybody on the host can read that "
                "environment: the API key belongs into serve_api_key, and the engine loads from disk without a token."
            )
        elif value is not None and re.search(r"[\n\r\0]", _word(value)):
            errors.append(f"The value of {name} in serve_environment spans lines: write it on one.")
        elif value is not None and not _sayable(value):
            errors.append(f"The value of {name} in serve_environment has characters that no environment can hold.")
    return errors


def _sayable(value: t.Any) -> bool:
    """Whether a word can be handed to a process: UTF-8 without a NUL."""
    words = value if isinstance(value, list) else [value]
    try:
        return not any(b"\0" in _word(word).encode() for word in words)
    except (UnicodeEncodeError, TypeError, ValueError):
        return False


def printable(value: t.Any) -> str:
    """The value as text that a terminal shows as it is."""
    return "".join(c if c.isprintable() else "?" for c in str(value))


def address_error(name: str, value: t.Any, listening: bool = False, names: bool = True) -> str | None:
    """What is wrong with an address on which others, or with C(listening) a server, are to be found.

    Without C(names) it must be an address as the host itself writes it, since it is looked for among the host's own.
    """
    text = str(value)
    told = f"{name} is '{printable(text)}'"
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        if not names:
            return f"{told}: it must be an IP address alone, without name, port, brackets or prefix length."
        if not re.search(r"[A-Za-z]", text) or not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?", text):
            return f"{told}: it must be an IP address or a host name alone, without port, brackets or scheme."
        local = text == "localhost"
    else:
        local = address.is_loopback or address.is_unspecified
        if not names and str(address) != text:
            return f"{told}: write it as {address}, which is how the host writes it."
    if local and not listening:
        return f"{told}, which other hosts cannot reach: set it to a private address of the host."
    return None


def service_errors(service: t.Mapping[str, t.Any]) -> list[str]:
    """What the unit cannot hold or the agent would refuse at its start: sentences, empty when all is well.

    C(service): C(unit), C(user), C(home), C(api_host), C(model_name), C(api_key), C(after), C(extra), and by the name
    of their variable C(paths) that the engine reads, C(ports) and C(timeouts).
    """
    errors = []
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*[.]service", str(service["unit"])):
        errors.append(f"serve_unit is '{service['unit']}': it must be the name of a unit such as kimi-k3.service.")
    if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,30}", str(service["user"])):
        errors.append(f"serve_user is '{service['user']}': it must be the name of an account, in lower case.")
    if not re.fullmatch(r"/var/lib/[A-Za-z0-9_][A-Za-z0-9._-]*", str(service["home"])):
        errors.append(
            f"serve_home is '{service['home']}': it must be a directory right below /var/lib, "
            "which systemd makes and owns."
        )
    if found := address_error("serve_api_host", service["api_host"], listening=True):
        errors.append(found)
    if not str(service["model_name"]).strip():
        errors.append("serve_model_name is empty: give the name under which clients ask for the model.")
    if service["api_key"] and not re.fullmatch(r"[\x21-\x7e]+", str(service["api_key"])):
        errors.append("serve_api_key has characters that no HTTP header can hold: use ASCII without spaces.")
    elif service["api_key"] and len(str(service["api_key"])) < _SHORTEST_KEY:
        errors.append(f"serve_api_key is too short: use {_SHORTEST_KEY} characters or more.")
    for unit in service["after"]:
        if not re.fullmatch(r"[A-Za-z0-9:_.@\\-]+[.][a-z]+", str(unit)):
            errors.append(
                f"serve_unit_after names '{printable(unit)}': it must be the name of a unit such as srv.mount."
            )
    for name, value in service["extra"].items():
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*", str(name)) or not isinstance(value, (str, int, float)):
            errors.append(
                f"serve_unit_extra names '{printable(name)}': it must map settings of [Service] to one value each."
            )
        elif re.search(r"[\n\r\0]", str(value)):
            errors.append(f"The value of {name} in serve_unit_extra spans lines: write it on one.")
    errors.extend(_hidden_paths(service["paths"], service["extra"]))
    by_port: dict[int, list[str]] = {}
    for name, value in service["ports"].items():
        by_port.setdefault(int(value), []).append(name)
    for port, names in by_port.items():
        if len(names) > 1:
            errors.append(f"{' and '.join(names)} are both {port}: they must be different ports.")
    timeouts = {name: float(value) for name, value in service["timeouts"].items()}
    zero = [name for name, value in timeouts.items() if value <= 0]
    errors.extend(f"{name} is 0: it must be more than 0 seconds." for name in zero)
    heartbeat, peer = timeouts.get("serve_heartbeat"), timeouts.get("serve_peer_timeout")
    if not zero and heartbeat is not None and peer is not None and heartbeat >= peer:
        errors.append(
            f"serve_heartbeat is {heartbeat:g} and serve_peer_timeout {peer:g}: "
            "a peer can only be missed after more than a heartbeat."
        )
    return errors


def _hidden_paths(paths: t.Mapping[str, t.Any], extra: t.Mapping[str, t.Any]) -> list[str]:
    """Paths that root sees and the service does not: found out here, and not after a checkpoint was fetched there."""
    errors = []
    for name, path in paths.items():
        for setting, folders in _HIDDEN.items():
            hidden = next((folder for folder in folders if f"{path}/".startswith(f"{folder}/")), None)
            if hidden and not _OPENED_BY & set(extra) and setting not in extra:
                errors.append(
                    f"{name} is '{printable(path)}', but {setting}= of the unit hides {hidden} from the engine: "
                    f"choose another place, or set {setting} in serve_unit_extra."
                )
    return errors


def rank_flags(settings: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """All flags of one rank in order: name, shape of the world, then serve_args, then what only this rank has.

    C(settings) are the keys of the filter P(baremetal.kimi_k3.rank_configuration#filter).
    """
    rank = int(settings["rank"])
    flags: dict[str, t.Any] = {
        "served-model-name": settings["model_name"],
        "tensor-parallel-size": int(settings["tensor_parallel"]),
        "pipeline-parallel-size": int(settings["pipeline_parallel"]),
        "nnodes": len(settings["hosts"]),
        "node-rank": rank,
        "master-addr": settings["hosts"][0]["address"],
        "master-port": int(settings["master_port"]),
    }
    for name, value in settings["args"].items():
        flags[normalise_flag(name)] = value
    if rank == 0:
        flags["host"] = settings["api_host"]
        flags["port"] = int(settings["api_port"])
    else:
        flags["headless"] = True
    return flags


def rank_environment(settings: t.Mapping[str, t.Any]) -> dict[str, str]:
    """The environment of one rank: this host's place, over it what role fabric wrote, over it what the operator set.

    The operator's None leaves a variable out wherever it comes from.
    """
    asked = applicable_environment(settings["environment"], settings["engine_version"], settings["releases"])
    computed = {
        "VLLM_HOST_IP": settings["address"],
        "GLOO_SOCKET_IFNAME": settings["interface"],
        "NCCL_SOCKET_IFNAME": settings["interface"],
    }
    if settings["pipeline_layers"]:
        computed["VLLM_PP_LAYER_PARTITION"] = ",".join(str(int(n)) for n in settings["pipeline_layers"])
    left_out = {name for name, value in settings["environment"].items() if value is None}
    merged = {**computed, **(settings.get("fabric_environment") or {}), **asked}
    return {name: value for name, value in merged.items() if name not in left_out}


def rank_configuration(settings: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """What the rank agent reads: the effective command and the map that must be equal on all ranks.

    The environment goes into a file of its own, which systemd reads (C(rank_environment)).
    """
    flags = rank_flags(settings)
    environment = rank_environment(settings)
    identity = {f"engine.{name}": str(value) for name, value in settings["engine"].items() if value is not None}
    identity["checkpoint"] = str(settings["checkpoint_identity"])
    for name, value in flags.items():
        if name not in RANK_FLAGS and value not in (None, False):
            identity[f"argument.--{name}"] = " ".join(flag_words({name: value})[1:])
    for name, value in environment.items():
        if name not in RANK_ENVIRONMENT:
            identity[f"environment.{name}"] = value
    return {
        "schema": 1,
        "group": settings["group"],
        "rank": int(settings["rank"]),
        "world_size": len(settings["hosts"]),
        "hosts": [
            {"rank": index, "name": host["name"], "address": host["address"]}
            for index, host in enumerate(settings["hosts"])
        ],
        "agent_port": int(settings["agent_port"]),
        "argv": [f"{settings['venv']}/bin/vllm", "serve", settings["model"], *flag_words(flags)],
        "identity": dict(sorted(identity.items())),
        # What the agent asks again at each start: an environment or checkpoint can change without this role.
        "engine_receipt": f"{settings['venv']}/engine.json",
        "checkpoint_statement": f"{settings['model']}/checkpoint.json",
        "api": {
            "url": f"http://{_probe_host(settings['api_host'])}:{int(settings['api_port'])}",
            "model": settings["model_name"],
        },
        "timeouts": {name: float(value) for name, value in settings["timeouts"].items()},
        "restart_limit": int(settings["restart_limit"]),
        "restart_window": float(settings["restart_window"]),
        "gpu_wait": bool(settings["gpu_wait"]),
    }


def _probe_host(api_host: str) -> str:
    """Where rank 0 reaches its own API: the wildcard addresses are answered on loopback."""
    if api_host in ("0.0.0.0", ""):  # noqa: S104 - compared, not bound
        return "127.0.0.1"
    if api_host in ("::", "[::]"):
        return "[::1]"
    return f"[{api_host}]" if ":" in api_host and not api_host.startswith("[") else api_host


def environment_file(environment: t.Mapping[str, t.Any]) -> str:
    """The text of a systemd EnvironmentFile; what it cannot hold is C(launch_errors)'s to find. None is left out."""
    lines = []
    for name, value in sorted((name, value) for name, value in environment.items() if value is not None):
        quoted = _word(value).replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`")
        lines.append(f'{name}="{quoted}"\n')
    return "".join(lines)


def parse_environment_file(text: str) -> dict[str, str]:
    """A file as C(environment_file) writes it, read again."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"\s*([A-Za-z_][A-Za-z0-9_]*)=(.*)$", line)
        if match:
            value = match[2].strip()
            if len(value) >= 2 and value[0] == value[-1] == '"':
                value = re.sub(r"\\(.)", r"\1", value[1:-1])
            found[match[1]] = value
    return found


def group_errors(shape: t.Mapping[str, t.Any]) -> list[str]:
    """What is wrong with one replica as the inventory describes it: sentences, empty when all is well.

    C(shape): C(group) (name), C(ranks) (host name to serve_rank or None), C(tensor_parallel), C(pipeline_parallel),
    C(layers) (of the model), C(pipeline_layers) (per stage, may be empty); and as far as they are known C(groups) and
    C(addresses), host name to serve_group and serve_address.
    """
    group = shape["group"]
    ranks: dict[str, t.Any] = dict(shape["ranks"])
    if not ranks:
        return [f"The group '{group}' (serve_group) has no host: put the hosts of the replica into it."]
    errors = []
    missing = sorted(host for host, rank in ranks.items() if rank is None)
    for host in missing:
        errors.append(f"serve_rank is not set for host {host}: give it a number from 0 to {len(ranks) - 1}.")
    numbers: dict[int, list[str]] = {}
    for host, rank in sorted(ranks.items()):
        if rank is None:
            continue
        if isinstance(rank, bool) or not re.fullmatch(r"\d+", str(rank).strip()):
            errors.append(f"serve_rank of host {host} is '{rank}': it must be a whole number from 0.")
            continue
        numbers.setdefault(int(rank), []).append(host)
    for rank, hosts in sorted(numbers.items()):
        if len(hosts) > 1:
            errors.append(
                f"serve_rank {rank} is set for {' and '.join(hosts)} in group '{group}': each rank belongs to one host."
            )
    if not errors:
        gap = sorted(set(range(len(ranks))) - set(numbers))
        if gap:
            beyond = ", ".join(f"{numbers[n][0]} has {n}" for n in sorted(set(numbers) - set(range(len(ranks)))))
            errors.append(
                f"No host of group '{group}' has serve_rank {', '.join(map(str, gap))} ({beyond}): "
                f"{len(ranks)} hosts take the ranks 0 to {len(ranks) - 1}."
            )
    errors.extend(_place_errors(shape))
    errors.extend(_shape_errors(shape, len(ranks)))
    return errors


def _place_errors(shape: t.Mapping[str, t.Any]) -> list[str]:
    """Hosts that think themselves in another replica, and addresses that cannot be those of several hosts."""
    group = shape["group"]
    errors = [
        f"Host {host} is in group '{group}', but its serve_group is '{other}': a host belongs to one replica, "
        "take it out of one of the groups."
        for host, other in sorted(dict(shape.get("groups") or {}).items())
        if other != group
    ]
    by_address: dict[str, list[str]] = {}
    addresses = {host: str(address) for host, address in dict(shape.get("addresses") or {}).items() if address}
    for host, address in sorted(addresses.items()):
        found = address_error("serve_address", address, listening=len(shape["ranks"]) == 1, names=False)
        if found:
            errors.append(f"On host {host} {found}")
        else:
            by_address.setdefault(address, []).append(host)
    for address, hosts in sorted(by_address.items()):
        if len(hosts) > 1:
            errors.append(
                f"serve_address {address} is set for {' and '.join(hosts)}: each host has an address of its own."
            )
    return errors


def _shape_errors(shape: t.Mapping[str, t.Any], hosts: int) -> list[str]:
    tensor, pipeline = _whole(shape["tensor_parallel"]), _whole(shape["pipeline_parallel"])
    errors = []
    for name, value, given in (
        ("serve_tensor_parallel_size", tensor, shape["tensor_parallel"]),
        ("serve_pipeline_parallel_size", pipeline, shape["pipeline_parallel"]),
    ):
        if value is None or value < 1:
            errors.append(f"{name} is '{given}': it must be a whole number of at least 1.")
    if errors or tensor is None or pipeline is None:
        return errors
    world = tensor * pipeline
    if world % hosts or (world // hosts) < 1:
        errors.append(
            f"serve_tensor_parallel_size {tensor} times serve_pipeline_parallel_size {pipeline} is {world} GPUs, "
            f"which does not divide over the {hosts} hosts of group '{shape['group']}'."
        )
    layers, wanted = list(shape["pipeline_layers"] or []), _whole(shape["layers"])
    if layers:
        counts = [_whole(n) for n in layers]
        if any(n is None or n < 1 for n in counts):
            errors.append(f"serve_pipeline_layers is {layers}: it must list one whole number per pipeline stage.")
        elif len(layers) != pipeline:
            errors.append(
                f"serve_pipeline_layers names {len(layers)} stages, but serve_pipeline_parallel_size is {pipeline}."
            )
        elif wanted is not None and sum(n for n in counts if n) != wanted:
            errors.append(
                f"serve_pipeline_layers {layers} sums to {sum(n for n in counts if n)}, "
                f"but the model has {wanted} layers (serve_layers)."
            )
    return errors


def _whole(value: t.Any) -> int | None:
    if isinstance(value, bool) or not re.fullmatch(r"\d+", str(value).strip()):
        return None
    return int(value)


def identity_differences(identities: t.Mapping[str, t.Mapping[str, str]]) -> list[str]:
    """Per key that is not equal on all hosts one sentence with each host's value."""
    keys = sorted({key for identity in identities.values() for key in identity})
    sentences = []
    for key in keys:
        values = {host: identity.get(key) for host, identity in identities.items()}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{host} has {'none' if v is None else v}" for host, v in sorted(values.items()))
            sentences.append(f"{key} differs between the hosts: {told}.")
    return sentences
