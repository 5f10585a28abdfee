# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A mistake in the inventory stops in validate with one sentence, before a host is touched.

The hosts' addresses are of the block for documentation, which nothing answers on: a task that reached for one would
end as unreachable and fail the test.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# All but those whose place is the controller, and the one that the others import.
PLAYBOOKS = sorted({path.stem for path in (ROOT / "playbooks").glob("*.yml")} - {"group", "bench_compare", "clients"})
GOOD = {
    "kimi_k3": {
        "hosts": {
            "gpu-a": {"ansible_host": "192.0.2.11", "serve_rank": 0},
            "gpu-b": {"ansible_host": "192.0.2.12", "serve_rank": 1},
        },
        "vars": {},
    }
}


def run(tmp_path, inventory, playbook="playbooks/validate.yml", *words):
    path = tmp_path / "inventory.json"
    path.write_text(json.dumps(inventory))
    return subprocess.run(
        [Path(sys.executable).parent / "ansible-playbook", "-i", path, playbook, *words],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_FORCE_COLOR": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


def changed(hosts=None, **variables):
    inventory = copy.deepcopy(GOOD)
    for name, values in (hosts or {}).items():
        inventory["kimi_k3"]["hosts"].setdefault(name, {}).update(values)
    inventory["kimi_k3"]["vars"].update(variables)
    return inventory


def test_a_good_inventory_passes_without_touching_a_host(tmp_path):
    result = run(tmp_path, GOOD)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "WARNING" not in result.stderr


def test_values_may_have_undefined_parts_with_defaults(tmp_path):
    inventory = changed(
        nothing={},
        serve_model_name="{{ nothing.name | default('kimi-k3') }}",
        serve_unit="{{ [nothing] | map(attribute='unit', default='kimi-k3.service') | first }}",
        preflight_addresses="{{ dict([['gpu-a', hostvars['gpu-a'].serve_address | default('')]]) }}",
    )
    result = run(tmp_path, inventory)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("inventory", "sentence"),
    [
        (changed({"gpu-b": {"serve_rank": 0}}), "serve_rank 0 is set for gpu-a and gpu-b"),
        (changed({"gpu-b": {"serve_rank": 2}}), "No host of group 'kimi_k3' has serve_rank 1 (gpu-b has 2)"),
        (changed({"gpu-b": {"serve_rank": None}}), "serve_rank is not set for host gpu-b"),
        (
            changed(serve_tensor_parallel_size=3, serve_pipeline_parallel_size=1, serve_pipeline_layers=[93]),
            "does not divide over",
        ),
        (changed(serve_pipeline_layers=[47, 47]), "sums to 94, but the model has 93 layers"),
        (changed(serve_modle="x"), "'serve_modle' is no variable of role serve: did you mean serve_model?"),
        (changed(checkpoint_revison="x"), "did you mean checkpoint_revision?"),
        (changed(vllm_wheelhose="x"), "did you mean vllm_wheelhouse?"),
        (changed(checkpoint_revision="main"), "checkpoint_revision is 'main': it must be"),
        (changed(serve_agent_port=8000), "serve_api_port and serve_agent_port are both 8000"),
        (changed(serve_args=None), "serve_args is set to nothing: give it a dictionary, or remove it."),
        (changed(serve_model="{{ nope }}/x"), "serve_model cannot be evaluated: 'nope' is undefined."),
        (changed(serve_api_key="hush\nhush"), "serve_api_key is not what it must be"),
        (
            changed({"gpu-b": {"serve_layers": 61}}),
            "serve_layers differs between the hosts: gpu-a has 93, gpu-b has 61.",
        ),
        (changed(serve_api_port=29502), "preflight_port 29502 is one of preflight_ports"),
        ({"gpus": GOOD["kimi_k3"]}, "has no host in a group 'kimi_k3'"),
        (changed(vllm_venv="/home/ubuntu/venv"), "ProtectHome= of the unit hides /home from the engine"),
        (changed(checkpoint_root="/root/models"), "hides /root from the engine"),
        (changed({"gpu-b": {"serve_address": "gpu-b.example"}}), "serve_address is 'gpu-b.example': it must be an IP"),
        (changed(serve_home="/home/kimi"), "must be a directory right below /var/lib"),
        (changed(serve_args={"node-rank": 1}), "which the role computes"),
        (changed(serve_environment={"A B": 1}), "is no name of an environment variable"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_mistake_is_one_sentence_and_no_host_is_touched(tmp_path, inventory, sentence):
    result = run(tmp_path, inventory, "site.yml")
    output = " ".join((result.stdout + result.stderr).split())
    assert result.returncode != 0
    assert sentence in output, output
    assert "unreachable=1" not in output
    assert "Traceback" not in output
    assert "hush" not in output


def test_a_limit_that_splits_the_group_is_refused(tmp_path):
    result = run(tmp_path, GOOD, "site.yml", "--limit", "gpu-b")
    assert result.returncode != 0
    assert "--limit leaves out gpu-a of group 'kimi_k3'" in " ".join(result.stdout.split())
    assert "unreachable=1" not in result.stdout


def test_two_replicas_have_a_rank_0_each(tmp_path):
    inventory = {
        "kimi_k3": {
            "children": {
                f"replica_{letter}": {
                    "hosts": {
                        f"{letter}-{rank}": {"ansible_host": f"192.0.2.{rank + 1}", "serve_rank": rank}
                        for rank in (0, 1)
                    },
                    "vars": {"serve_group": f"replica_{letter}"},
                }
                for letter in "xy"
            }
        }
    }
    result = run(tmp_path, inventory)
    assert result.returncode == 0, result.stdout + result.stderr
    del inventory["kimi_k3"]["children"]["replica_y"]["hosts"]["y-0"]
    result = run(tmp_path, inventory)
    assert result.returncode != 0
    assert "group 'replica_y' has serve_rank 0" in " ".join(result.stdout.split())


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_a_group_without_hosts_is_no_success(tmp_path, playbook):
    result = run(tmp_path, {"gpus": {"hosts": {"gpu-a": {"ansible_host": "192.0.2.11"}}}}, f"playbooks/{playbook}.yml")
    assert result.returncode != 0
    assert "has no host in a group 'kimi_k3'" in " ".join(result.stdout.split())
