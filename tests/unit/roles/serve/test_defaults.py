# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The Kimi K3 defaults are data: what two hosts with 8 B200 each get is compared word by word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
ENGINE = {"lock_digest": "1" * 64, "versions": {"vllm": "0.32.0", "torch": "2.13.0"}}

PLAYBOOK = """
- name: Render
  hosts: all
  gather_facts: false
  tasks:
    - name: Defaults of the role in scope
      ansible.builtin.import_role:
        name: baremetal.kimi_k3.serve
        tasks_from: validate.yml
    - name: Render
      ansible.builtin.copy:
        content: >-
          {{ {'configuration': __serve_settings | baremetal.kimi_k3.rank_configuration,
              'environment': __serve_settings | baremetal.kimi_k3.rank_environment,
              'unit': lookup('ansible.builtin.template', unit)} | to_json }}
        dest: "{{ out }}/{{ inventory_hostname }}.json"
        mode: "0644"
      delegate_to: localhost
"""


def observed(number: int, engine: dict) -> dict:
    return {
        "route": {"address": f"10.0.0.{number}", "interface": "eno1"},
        "engine": engine,
        "checkpoint": {"identity_digest": "2" * 64},
        "unit": {},
        "status": None,
    }


@pytest.fixture
def render(tmp_path):
    def run(**variables):
        engine = variables.pop("engine", ENGINE)
        host_variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        inventory = {
            "kimi_k3": {
                "hosts": {
                    "gpu-b": {**host_variables, "serve_rank": 1, "__serve_observed": observed(12, engine)},
                    "gpu-a": {**host_variables, "serve_rank": 0, "__serve_observed": observed(11, engine)},
                },
                "vars": {
                    **variables,
                    "out": str(tmp_path),
                    "unit": str(ROOT / "roles" / "serve" / "templates" / "kimi-k3.service.j2"),
                },
            }
        }
        (tmp_path / "inventory.json").write_text(json.dumps(inventory))
        (tmp_path / "render.yml").write_text(PLAYBOOK)
        result = subprocess.run(
            [
                Path(sys.executable).parent / "ansible-playbook",
                "-i",
                tmp_path / "inventory.json",
                tmp_path / "render.yml",
            ],
            env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_INJECT_FACT_VARS": "false"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert "WARNING" not in result.stderr, result.stderr
        return [json.loads((tmp_path / f"{host}.json").read_text()) for host in ("gpu-a", "gpu-b")]

    return run


MODEL = "/srv/kimi-k3/moonshotai--Kimi-K3/f831ab66814297da540d832a5235f8e904f29d06"
COMMON = """
    /opt/kimi-k3/venv/bin/vllm serve {model}
    --served-model-name kimi-k3
    --tensor-parallel-size 8 --pipeline-parallel-size 2
    --nnodes 2 --node-rank {rank} --master-addr 10.0.0.11 --master-port 29501
    --trust-remote-code --language-model-only
    --moe-backend flashinfer_trtllm --disable-custom-all-reduce
    --kv-cache-dtype fp8 --enable-prefix-caching
    --max-model-len 49152 --distributed-timeout-seconds 3600
    {own}
"""


def command(rank: int, own: str) -> list[str]:
    return COMMON.format(model=MODEL, rank=rank, own=own).split()


def test_the_lambda_page_word_by_word(render):
    first, second = render()
    assert first["configuration"]["argv"] == command(0, "--host 0.0.0.0 --port 8000")
    assert second["configuration"]["argv"] == command(1, "--headless")
    environment = {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
        "VLLM_PP_LAYER_PARTITION": "47,46",
        "GLOO_SOCKET_IFNAME": "eno1",
        "NCCL_SOCKET_IFNAME": "eno1",
    }
    # The tail fusion switch is known to no release, so a release is not given it.
    assert first["environment"] == {**environment, "VLLM_HOST_IP": "10.0.0.11"}
    assert second["environment"] == {**environment, "VLLM_HOST_IP": "10.0.0.12"}
    assert first["configuration"]["identity"] == second["configuration"]["identity"]


AGENTIC = "--enable-auto-tool-choice --tool-call-parser kimi_k3 --reasoning-parser kimi_k3"


def test_agents_are_served_word_by_word(render):
    first, second = render(serve_agentic=True)
    assert first["configuration"]["argv"] == command(0, f"{AGENTIC} --host 0.0.0.0 --port 8000")
    assert second["configuration"]["argv"] == command(1, f"{AGENTIC} --headless")
    identity = first["configuration"]["identity"]
    assert identity["argument.--tool-call-parser"] == "kimi_k3"
    assert second["configuration"]["identity"] == identity
    # What must be equal on all ranks is part of their identity, so a change of it is a restart of the group.
    assert identity != render()[0]["configuration"]["identity"]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        # Written as a flag, or as Python writes it: the operator's word replaces the parser and is not said twice.
        ({"tool-call-parser": "kimi_k2"}, AGENTIC.replace("parser kimi_k3", "parser kimi_k2", 1)),
        ({"tool_call_parser": "kimi_k2"}, AGENTIC.replace("parser kimi_k3", "parser kimi_k2", 1)),
        ({"--reasoning-parser": None}, "--enable-auto-tool-choice --tool-call-parser kimi_k3"),
    ],
)
def test_the_operators_flags_win_over_those_for_agents(render, own, words):
    first, _second = render(serve_agentic=True, serve_args=own)
    assert first["configuration"]["argv"] == command(0, f"{words} --host 0.0.0.0 --port 8000")


def test_agents_without_a_profile(render):
    argv = render(serve_profile="none", serve_agentic="true")[0]["configuration"]["argv"]
    start = argv.index("--enable-auto-tool-choice")
    assert argv[start : start + 5] == AGENTIC.split()
    assert [argv.count(word) for word in AGENTIC.split() if word.startswith("--")] == [1, 1, 1]


def test_the_unit_has_the_limits_that_rdma_needs_and_leaves_the_gpus_reachable(render):
    unit = render()[0]["unit"].splitlines()
    for line in (
        "Type=notify",
        "Restart=always",
        "RestartPreventExitStatus=78",
        "LimitMEMLOCK=infinity",
        "User=kimi-k3",
    ):
        assert line in unit
    assert not [
        line for line in unit if line.startswith(("ProtectClock", "DevicePolicy", "PrivateDevices", "DeviceAllow"))
    ]


def test_the_recipe_of_vllm(render):
    first, _second = render(serve_profile="vllm_recipe", serve_args={"max-model-len": 262144})
    argv = first["configuration"]["argv"]
    assert argv[argv.index("--gpu-memory-utilization") + 1] == "0.9"
    assert argv[argv.index("--max-model-len") + 1] == "262144"
    assert first["environment"]["VLLM_ALLREDUCE_USE_FLASHINFER"] == "1"


def test_an_older_release_keeps_the_first_model_runner(render):
    first, _second = render(engine={**ENGINE, "versions": {"vllm": "0.27.1"}})
    assert first["environment"]["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert "VLLM_ENABLE_K3_LATENT_MOE_TAIL_FUSION" not in first["environment"]


def test_no_secret_is_in_what_others_can_read(render):
    rendered = json.dumps(render(serve_api_key="very-secret-key", serve_group_secret="another-secret"))
    assert "very-secret-key" not in rendered
    assert "another-secret" not in rendered
    assert "LoadCredential=api-key:/etc/kimi-k3/api.key" in rendered
