# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A completion through both ranks is the one that a single process gives, with half of the files as with all."""

from __future__ import annotations

import json

import pytest
import yaml
from replica import INVENTORY, playbook

PROMPTS = ["Hello", "The rank that", "0 1 2 3"]

# One process, no pipeline, the whole checkpoint, the same flags otherwise.
REFERENCE = """
import json, sys
from vllm import LLM, SamplingParams

# The engine's own processes import this file again.
if __name__ == "__main__":
    arguments, prompts = json.loads(sys.argv[1])
    engine = LLM(**arguments)
    answers = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    print("TOKENS " + json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))
"""


@pytest.fixture(scope="module")
def reference(replica):
    """Token ids of each prompt from a single process on rank 0's host."""
    host = replica.ranks[0]
    variables = yaml.safe_load(INVENTORY.read_text(encoding="utf-8"))["kimi_k3"]["vars"]
    playbook("playbooks/fetch.yml", "--limit", host.name, "-e", "checkpoint_scope=all checkpoint_path=/srv/reference")
    arguments = {name.replace("-", "_"): value for name, value in variables["serve_args"].items()}
    arguments["model"] = "/srv/reference"
    host.run(f"cat > /root/reference.py <<'END'\n{REFERENCE}\nEND")
    words = json.dumps([arguments, PROMPTS])
    output = host.run(
        "set -a; . /etc/kimi-k3/serve.env; unset VLLM_PP_LAYER_PARTITION; "
        f"HF_HUB_OFFLINE=1 /opt/kimi-k3/venv/bin/python /root/reference.py '{words}'"
    )
    return json.loads(next(line for line in output.splitlines() if line.startswith("TOKENS "))[7:])


def test_half_of_the_checkpoint_gives_the_tokens_of_a_single_process(replica, reference):
    replica.wait_serving()
    answers = [replica.complete(prompt) for prompt in PROMPTS]
    assert answers == reference
    assert len({token for answer in answers for token in answer}) > 3


def test_the_whole_checkpoint_gives_them_too_after_one_restart(replica, reference):
    before = replica.generation()
    playbook("site.yml", "-e", "checkpoint_scope=all")
    assert replica.generation() == before + 1
    assert [replica.complete(prompt) for prompt in PROMPTS] == reference
