# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the first installation left on the hosts."""

from __future__ import annotations

import re

import pytest

testinfra_hosts = ["ansible://kimi_k3"]
VERSION = "580.159.04-1"


@pytest.mark.parametrize(
    "name", ["nvidia-open", "nvidia-persistenced", "nvidia-fabricmanager-580", "libnvidia-nscq", "libnvsdm"]
)
def test_driver_and_companions_have_one_version_and_are_held(host, name):
    assert host.package(name).version == VERSION
    assert name in host.run("apt-mark showhold").stdout.split()


def test_names_of_the_next_branch_are_not_there(host):
    assert not host.package("nvidia-fabricmanager").is_installed
    assert host.package("nvlsm").is_installed


def test_the_branch_was_pinned_in_a_transaction_of_its_own_and_first(host):
    history = host.file("/var/log/apt/history.log").content_string
    lines = [line for line in re.findall(r"Commandline: (.*)", history) if "nvidia" in line]
    pins = [number for number, line in enumerate(lines) if "nvidia-driver-pinning-580" in line]
    drivers = [number for number, line in enumerate(lines) if "nvidia-open=580" in line]
    assert max(pins) < max(drivers)
    assert "nvidia-open" not in lines[pins[-1]]


def test_the_pin_keeps_the_next_branch_away(host):
    policy = host.run("apt-cache policy nvidia-open").stdout
    assert f"Candidate: {VERSION}" in policy
    assert "590.48.01-1" in policy


def test_the_repository_is_signed_by_its_own_key_alone(host):
    source = host.file("/etc/apt/sources.list.d/kimi-k3-cuda.sources").content_string
    assert "Signed-By: /etc/apt/keyrings/kimi-k3-cuda." in source
    assert "rusted" not in source


@pytest.mark.parametrize("name", ["nvidia-persistenced", "nvidia-fabricmanager", "nvidia-dcgm"])
def test_services_run_and_start_at_boot(host, name):
    service = host.service(name)
    assert service.is_running
    assert service.is_enabled


def test_nouveau_is_kept_out(host):
    assert "blacklist nouveau" in host.file("/etc/modprobe.d/kimi-k3-nouveau.conf").content_string
