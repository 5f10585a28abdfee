# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest
from ansible_collections.baremetal.kimi_k3.plugins.module_utils import launch


def shape(**changes):
    base = {
        "group": "kimi_k3",
        "ranks": {"a": 0, "b": 1},
        "tensor_parallel": 8,
        "pipeline_parallel": 2,
        "layers": 93,
        "pipeline_layers": [47, 46],
    }
    return {**base, **changes}


def settings(**changes):
    base = {
        "group": "kimi_k3",
        "rank": 0,
        "hosts": [{"name": "a", "address": "10.0.0.11"}, {"name": "b", "address": "10.0.0.12"}],
        "address": "10.0.0.11",
        "interface": "eno1",
        "tensor_parallel": 8,
        "pipeline_parallel": 2,
        "pipeline_layers": [47, 46],
        "master_port": 29501,
        "agent_port": 29500,
        "api_host": "0.0.0.0",
        "api_port": 8000,
        "model": "/models/Kimi-K3",
        "model_name": "kimi-k3",
        "venv": "/opt/venv",
        "args": {"max-model-len": 49152},
        "environment": {},
        "releases": {},
        "engine_version": "0.32.0",
        "engine": {"vllm": "0.32.0", "lock": "abc", "flashinfer-python": None},
        "checkpoint_identity": "def",
        "timeouts": {"peer": "10"},
        "restart_limit": 5,
        "restart_window": 3600,
        "gpu_wait": True,
    }
    return {**base, **changes}


@pytest.mark.parametrize(
    ("rank", "tensor", "pipeline", "hosts", "expected"),
    [
        (0, 8, 2, 2, [0]),
        (1, 8, 2, 2, [1]),
        (0, 8, 2, 1, [0, 1]),
        (2, 8, 2, 4, [1]),
        (0, 16, 1, 2, [0]),
        (1, 16, 1, 2, [0]),
        (1, 4, 4, 2, [2, 3]),
    ],
)
def test_rank_stages(rank, tensor, pipeline, hosts, expected):
    assert launch.rank_stages(rank, tensor, pipeline, hosts) == expected


@pytest.mark.parametrize(
    ("rank", "tensor", "pipeline", "hosts"), [(0, 8, 2, 3), (2, 8, 2, 2), (0, 0, 2, 2), (-1, 8, 2, 2)]
)
def test_rank_stages_refuses(rank, tensor, pipeline, hosts):
    with pytest.raises(launch.LaunchError):
        launch.rank_stages(rank, tensor, pipeline, hosts)


def test_a_right_group_has_no_errors():
    assert launch.group_errors(shape()) == []
    assert launch.group_errors(shape(ranks={"a": "1", "b": "0"}, pipeline_layers=[])) == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ranks": {}}, "has no host"),
        ({"ranks": {"a": 0, "b": 0}}, "serve_rank 0 is set for a and b in group 'kimi_k3'"),
        ({"ranks": {"a": 0, "b": None}}, "serve_rank is not set for host b"),
        ({"ranks": {"a": 0, "b": 2}}, "has serve_rank 1 (b has 2)"),
        ({"ranks": {"a": 0, "b": "one"}}, "serve_rank of host b is 'one'"),
        ({"ranks": {"a": 0, "b": -1}}, "serve_rank of host b is '-1'"),
        ({"ranks": {"a": 0, "b": True}}, "serve_rank of host b is 'True'"),
        ({"ranks": {"a": 0, "b": 1, "c": 2}}, "16 GPUs, which does not divide over the 3 hosts"),
        ({"tensor_parallel": 0}, "serve_tensor_parallel_size is '0'"),
        ({"pipeline_layers": [47, 47]}, "sums to 94, but the model has 93 layers"),
        ({"pipeline_layers": [93]}, "names 1 stages, but serve_pipeline_parallel_size is 2"),
        ({"pipeline_layers": [47, "x"]}, "one whole number per pipeline stage"),
    ],
)
def test_group_errors_names_the_mistake(changes, expected):
    errors = launch.group_errors(shape(**changes))
    assert len(errors) == 1
    assert expected in errors[0]


def test_hosts_come_in_the_order_of_their_ranks():
    assert launch.hosts_by_rank(["b", "a", "c"], {"a": {"serve_rank": "10"}, "b": {"serve_rank": 2}, "c": {}}) == [
        "b",
        "a",
    ]


def test_environment_knows_releases():
    releases = {"ONLY": {"only": ["kimi-k3"]}, "LATE": {"since": "0.28.0"}, "EARLY": {"before": "0.28"}}
    asked = {"ONLY": 0, "LATE": True, "EARLY": "x", "ALWAYS": False, "LEFT_OUT": None}
    assert launch.applicable_environment(asked, "0.32.0+cpu", releases) == {"LATE": "1", "ALWAYS": "0"}
    assert launch.applicable_environment(asked, "0.27.1", releases) == {"EARLY": "x", "ALWAYS": "0"}


def test_flag_words():
    flags = {"a": True, "b": False, "c": None, "d": [1, "x"], "e": {"k": [1, 2], "l": "m"}, "f": 0.9}
    assert launch.flag_words(flags) == ["--a", "--d", "1", "x", "--e", '{"k":[1,2],"l":"m"}', "--f", "0.9"]


@pytest.mark.parametrize("name", ["node-rank", "--master_addr", "headless", "api-key", "pipeline_parallel_size"])
def test_computed_flags_cannot_be_named(name):
    assert launch.launch_errors({name: 1, "dtype": "auto"}, {}) == [
        f"serve_args names '{name}', which the role computes: set the serve_* variable for it instead."
    ]


def test_identity_leaves_out_what_belongs_to_a_rank():
    first = launch.rank_configuration(settings())
    second = launch.rank_configuration(settings(rank=1, address="10.0.0.12", interface="eno2", model="/other/path"))
    assert first["identity"] == second["identity"]
    assert first["identity"] == {
        "argument.--master-addr": "10.0.0.11",
        "argument.--master-port": "29501",
        "argument.--max-model-len": "49152",
        "argument.--nnodes": "2",
        "argument.--pipeline-parallel-size": "2",
        "argument.--served-model-name": "kimi-k3",
        "argument.--tensor-parallel-size": "8",
        "checkpoint": "def",
        "engine.lock": "abc",
        "engine.vllm": "0.32.0",
        "environment.VLLM_PP_LAYER_PARTITION": "47,46",
    }


def test_differences_name_the_key_and_every_host():
    told = launch.identity_differences({"a": {"x": "1", "y": "2"}, "b": {"x": "1", "y": "3"}, "c": {"x": "1"}})
    assert told == ["y differs between the hosts: a has 2, b has 3, c has none."]


def test_the_operators_environment_wins():
    environment = launch.rank_environment(settings(environment={"GLOO_SOCKET_IFNAME": "ib0"}))
    assert environment == {
        "VLLM_HOST_IP": "10.0.0.11",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_SOCKET_IFNAME": "eno1",
        "VLLM_PP_LAYER_PARTITION": "47,46",
    }


@pytest.mark.parametrize(
    ("api_host", "expected"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("10.0.0.11", "10.0.0.11"), ("fd00::1", "[fd00::1]")],
)
def test_the_probe_asks_where_the_api_listens(api_host, expected):
    assert launch.rank_configuration(settings(api_host=api_host))["api"]["url"] == f"http://{expected}:8000"


def test_environment_file_is_quoted_for_systemd():
    text = launch.environment_file({"B": 'say "$HOME" \\ `x`', "A": "1"})
    assert text == 'A="1"\nB="say \\"\\$HOME\\" \\\\ \\`x\\`"\n'


def test_environment_file_takes_numbers_and_leaves_out_what_is_none():
    assert launch.environment_file({"B": 2, "A": True, "C": None}) == 'A="1"\nB="2"\n'


@pytest.mark.parametrize("environment", [{"A B": "1"}, {"A": "1\n2"}, {"1A": ""}, {"A": ["\r"], "B": "\0"}])
def test_an_environment_that_no_file_can_hold_is_refused(environment):
    assert len(launch.launch_errors({}, {**environment, "GOOD": 1})) == 1


@pytest.mark.parametrize("version", ["", "main", "kimi"])
def test_a_version_without_numbers_is_refused(version):
    with pytest.raises(launch.LaunchError, match="no version number"):
        launch.parse_release(version)


def test_what_role_fabric_wrote_is_between_the_computed_and_the_operators():
    fabric = {"NCCL_IB_HCA": "=mlx5_4:1", "GLOO_SOCKET_IFNAME": "eno2", "NCCL_DEBUG": "WARN"}
    environment = launch.rank_environment(settings(fabric_environment=fabric, environment={"NCCL_DEBUG": "INFO"}))
    assert environment["NCCL_IB_HCA"] == "=mlx5_4:1"
    assert environment["GLOO_SOCKET_IFNAME"] == "eno2"
    assert environment["NCCL_DEBUG"] == "INFO"
    without = launch.rank_environment(settings(fabric_environment=fabric, environment={"NCCL_IB_HCA": None}))
    assert "NCCL_IB_HCA" not in without


def test_an_environment_file_is_read_as_it_was_written():
    environment = {"A": "=mlx5_4:1", "B": 'quote " dollar $ back \\ tick `', "C": ""}
    assert launch.parse_environment_file(launch.environment_file(environment)) == environment
    assert launch.parse_environment_file("# comment\n\nPLAIN=value\nnot a line\n") == {"PLAIN": "value"}


@pytest.mark.parametrize(
    ("args", "environment", "expected"),
    [
        ({"-tp": 4}, {}, "'-tp', which the role computes"),
        ({"no_headless": True}, {}, "which the role computes"),
        ({"max_model_len": 1, "--max-model-len": 2}, {}, "which are one flag"),
        ({"max-model-len 5": True}, {}, "is no flag"),
        ({"max-model-len=5": True}, {}, "is no flag"),
        ({"": 1}, {}, "is no flag"),
        ({5: 1}, {}, "is no flag"),
        ({"ssl_keyfile": "/x"}, {}, "plain HTTP"),
        ({"x": "a\0b"}, {}, "no command line can hold"),
        ({"x": ["a", "\ud800"]}, {}, "no command line can hold"),
        ({}, {"A B": 1}, "is no name of an environment variable"),
        ({}, {"A\nB": 1}, "'A?B' in serve_environment"),
        ({}, {"HF_TOKEN": "hf_x"}, "serve_environment names HF_TOKEN, which looks like a secret"),
        ({}, {"VLLM_API_KEY": "x"}, "the API key belongs into serve_api_key"),
        ({}, {"A": "x\ny"}, "spans lines"),
        ({}, {"A": "\ud800"}, "no environment can hold"),
    ],
)
def test_what_cannot_be_given_to_vllm_is_one_sentence(args, environment, expected):
    (error,) = launch.launch_errors(args, environment)
    assert expected in error


def test_what_can_be_given_to_vllm_is_left_alone():
    args = {"max_model_len": 1, "--x": None, "compilation-config.mode": 3, "a": [1, "b"], "b": {"c": "ü"}}
    assert launch.launch_errors(args, {"A": None, "B": '$x 100% "q"', "_C": True}) == []


@pytest.mark.parametrize("odd", [None, [], "a=b", 5])
def test_flags_that_are_no_dictionary_are_told(odd):
    with pytest.raises(launch.LaunchError, match=r"serve_args is a .*: it must be a dictionary"):
        launch.launch_errors(odd, {})
    with pytest.raises(launch.LaunchError, match=r"serve_environment is a .*: it must be a dictionary"):
        launch.launch_errors({}, odd)


SERVICE = {
    "unit": "kimi-k3.service",
    "user": "kimi-k3",
    "home": "/var/lib/kimi-k3",
    "api_host": "0.0.0.0",
    "api_key": "",
    "model_name": "kimi-k3",
    "after": ["srv-kimi\\x2dk3.mount"],
    "extra": {"Nice": -5, "PrivateTmp": False},
    "paths": {"serve_model": "/srv/kimi-k3", "vllm_venv": "", "serve_venv": "/homes/venv"},
    "ports": {"serve_api_port": "8000", "serve_agent_port": 29500},
    "timeouts": {"serve_heartbeat": 2, "serve_peer_timeout": "10"},
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"unit": "kimi-k3"}, "serve_unit is 'kimi-k3'"),
        ({"unit": "a b.service"}, "serve_unit is"),
        ({"unit": "../x.service"}, "serve_unit is"),
        ({"user": "Ünï"}, "serve_user is"),
        ({"user": "-x"}, "serve_user is"),
        (
            {"paths": {"vllm_venv": "/home/ubuntu/venv"}},
            "vllm_venv is '/home/ubuntu/venv', but ProtectHome= of the unit",
        ),
        ({"paths": {"checkpoint_path": "/root"}}, "ProtectHome= of the unit hides /root"),
        ({"paths": {"checkpoint_path": "/var/tmp"}, "extra": {"ProtectHome": "no"}}, "PrivateTmp= of the unit hides"),  # noqa: S108
        ({"api_key": "short"}, "serve_api_key is too short"),
        ({"home": "/home/kimi"}, "right below /var/lib"),
        ({"home": "/var/lib/.."}, "right below /var/lib"),
        ({"home": "/var/lib/a/b"}, "right below /var/lib"),
        ({"api_host": "http://x"}, "without port, brackets or scheme"),
        ({"api_host": "[::]"}, "without port, brackets or scheme"),
        ({"api_host": ""}, "without port, brackets or scheme"),
        ({"model_name": " "}, "serve_model_name is empty"),
        ({"api_key": "hush hush"}, "no HTTP header can hold"),
        ({"api_key": "hush-ü"}, "no HTTP header can hold"),
        ({"after": ["a b.service"]}, "serve_unit_after names"),
        ({"extra": {"A\nExecStart": 1}}, "serve_unit_extra names 'A?ExecStart'"),
        ({"extra": {"Nice": [1]}}, "one value each"),
        ({"extra": {"Nice": "1\nUser=root"}}, "spans lines"),
        ({"ports": {"serve_api_port": "29500", "serve_agent_port": 29500}}, "serve_agent_port are both 29500"),
        ({"timeouts": {"serve_heartbeat": 0, "serve_peer_timeout": 10}}, "serve_heartbeat is 0"),
        ({"timeouts": {"serve_heartbeat": 10, "serve_peer_timeout": 10}}, "after more than a heartbeat"),
    ],
)
def test_what_a_unit_cannot_hold_is_one_sentence(changes, expected):
    assert launch.service_errors(SERVICE) == []
    (error,) = launch.service_errors({**SERVICE, **changes})
    assert expected in error
    assert "hush" not in error


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"groups": {"a": "kimi_k3", "b": "other"}}, "Host b is in group 'kimi_k3', but its serve_group is 'other'"),
        ({"addresses": {"a": "10.0.0.1", "b": "10.0.0.1"}}, "serve_address 10.0.0.1 is set for a and b"),
        ({"addresses": {"a": "10.0.0.1:80"}}, "On host a serve_address is '10.0.0.1:80'"),
        ({"addresses": {"a": "10.0.0.300"}}, "must be an IP address alone"),
        ({"addresses": {"a": "10.0.0.1/24"}}, "must be an IP address alone"),
        ({"addresses": {"a": "[fd00::1]"}}, "must be an IP address alone"),
        ({"addresses": {"a": "gpu-a.example"}}, "must be an IP address alone"),
        ({"addresses": {"a": "FD00:0::1"}}, "write it as fd00::1"),
        ({"addresses": {"a": "127.0.0.1"}}, "other hosts cannot reach"),
        ({"addresses": {"a": "localhost"}}, "must be an IP address alone"),
        ({"addresses": {"a": "::"}}, "other hosts cannot reach"),
    ],
)
def test_places_that_cannot_be_are_named(changes, expected):
    (error,) = launch.group_errors(shape(**changes))
    assert expected in error


def test_places_that_can_be_are_left_alone():
    base = {"ranks": {"a": 0, "b": 1}, "group": "kimi_k3"}
    for addresses in (
        {},
        {"a": "", "b": ""},
        {"a": "10.0.0.1", "b": ""},
        {"a": "fd00::1", "b": "fd00::2"},
    ):
        assert launch.group_errors(shape(**base, addresses=addresses, groups={"a": "kimi_k3", "b": "kimi_k3"})) == []
