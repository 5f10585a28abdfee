# Copyright: (c) 2026, the baremetal.kimi_k3 authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What becomes of hosts that are not as they should be, and of those that are somebody else's."""

from __future__ import annotations

import re

import pytest
from replica import playbook

CONVERGE = "molecule/cuda/converge.yml"
RUNNING = "cat /srv/scenario-cuda/node/proc/driver/nvidia/version"
BOOT = "cat /proc/sys/kernel/random/boot_id"
APT = "DEBIAN_FRONTEND=noninteractive apt-get -qq -y --allow-downgrades --allow-change-held-packages"
NOTHING = [("rank0", "0", "0"), ("rank1", "0", "0")]


def converge(*words, expect=0):
    return " ".join(playbook(CONVERGE, *words, expect=expect).split())


def recap(output):
    return re.findall(r"(rank\d) : ok=\d+ changed=(\d+) unreachable=\d+ failed=(\d+)", output)


@pytest.fixture
def old(replica):
    """Driver 570 on both hosts, running."""
    for rank in replica.ranks:
        rank.run(
            f"{APT} install nvidia-open=570.148.08-1 nvidia-persistenced=570.148.08-1 nvidia-fabricmanager-570 "
            "libnvidia-nscq=570.148.08-1 libnvsdm=570.148.08-1 nvidia-fabricmanager-580- && "
            "apt-mark hold nvidia-open nvidia-persistenced nvidia-fabricmanager-570 && /usr/lib/nvidia-load"
        )
        assert "570.148.08" in rank.run(RUNNING)
    return replica


def test_a_host_that_is_right_costs_one_execution_and_changes_nothing(replica):
    output = playbook(CONVERGE, "-vvv")
    assert recap(" ".join(output.split())) == NOTHING
    # Per host one that reads the fingerprint for the test, and one that looks.
    assert len(re.findall(r"^<[^>]+> SSH: EXEC", output, re.MULTILINE)) == 4
    assert "Driver 580.159.04 is new enough and open: it is left alone." in output


def test_companions_that_are_gone_or_of_another_branch_come_in_the_drivers_version(replica):
    """One is gone; one is of an older branch, under another name, and held; one is newer than the driver, and held."""
    rank = replica.ranks[1]
    rank.run(
        f"{APT} install nvidia-fabricmanager-570 nvidia-fabricmanager-580- libnvidia-nscq=590.48.01-1 libnvsdm- && "
        "apt-mark hold nvidia-fabricmanager-570 libnvidia-nscq"
    )
    output = converge()
    assert (
        "nvidia-fabricmanager, libnvsdm is missing and nvidia-fabricmanager-570 570.148.08-1, libnvidia-nscq "
        "590.48.01-1 does not fit: installed in exactly that version." in output
    )
    held = rank.run("apt-mark showhold").split()
    for name in ("nvidia-fabricmanager-580", "libnvidia-nscq", "libnvsdm"):
        assert "580.159.04-1" in rank.run(f"dpkg-query --show {name}")
        assert name in held
    assert rank.run("systemctl is-active nvidia-fabricmanager").strip() == "active"
    assert recap(converge()) == NOTHING


def test_an_entry_of_the_package_cuda_keyring_is_used_again(replica):
    """Beside the role's own it makes apt refuse everything."""
    rank = replica.ranks[1]
    rank.run(f"{APT} purge libnvsdm && {APT} install cuda-keyring")
    assert "Conflicting values set for option Signed-By" in rank.run("apt-get -qq update 2>&1", check=False)
    output = converge()
    entry = "/etc/apt/sources.list.d/cuda-debian12-x86_64.list"
    assert f"rank1: {entry} has file:/srv/scenario-cuda/repository already: it is used as it is." in output
    assert "580.159.04-1" in rank.run("dpkg-query --show libnvsdm")
    rank.run("apt-get -qq update && test ! -e /etc/apt/sources.list.d/kimi-k3-cuda.sources")
    # And back: without the package the role has an entry of its own.
    rank.run(f"{APT} purge cuda-keyring libnvsdm")
    converge()
    rank.run("apt-get -qq update && test -e /etc/apt/sources.list.d/kimi-k3-cuda.sources")


def test_a_key_of_somebody_else_is_refused(replica):
    rank = replica.ranks[0]
    rank.run(f"{APT} purge libnvsdm")
    output = converge("-e", f"scenario_key={'A' * 40}", expect=2)
    assert f"not {'A' * 40} (cuda_key_fingerprint): nothing was installed." in output
    assert rank.run("dpkg-query --show --showformat='${Version}' libnvsdm", check=False).strip() == ""
    converge()


def test_a_digest_that_does_not_fit_is_refused(replica):
    rank = replica.ranks[0]
    rank.run(f"{APT} purge libnvsdm")
    output = converge("-e", f"cuda_key_sha256={'0' * 64}", expect=2)
    assert "checksum" in output
    # What is left of a download is no key, and is newer than the key; that one is binary this time.
    rank.run("echo nothing > /var/cache/kimi-k3/cuda.key")
    rank.run("systemd-run --quiet --unit scenario-key python3 -m http.server -d /srv/scenario-cuda -b 127.0.0.1 8123")
    try:
        converge("-e", "cuda_key_url=http://127.0.0.1:8123/key.gpg")
    finally:
        rank.run("systemctl stop scenario-key")
    source = rank.run("cat /etc/apt/sources.list.d/kimi-k3-cuda.sources")
    assert "Signed-By: /etc/apt/keyrings/kimi-k3-cuda.gpg" in source
    assert "580.159.04-1" in rank.run("dpkg-query --show libnvsdm")


def test_apt_in_use_by_another_process_is_waited_for(replica):
    rank = replica.ranks[1]
    rank.run(f"{APT} purge libnvsdm")
    hold = (
        "import fcntl, time; file = open('/var/lib/dpkg/lock-frontend', 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('held', flush=True); time.sleep(60)"
    )
    rank.run(f'systemd-run --quiet --unit scenario-lock python3 -c "{hold}"')
    rank.run("until journalctl -u scenario-lock | grep -q held; do sleep 0.1; done")
    converge()
    assert "580.159.04-1" in rank.run("dpkg-query --show libnvsdm")


def test_an_old_driver_is_not_touched_without_being_told(old):
    output = converge(expect=2)
    assert (
        "rank0: Driver 570.148.08 is older than 580. set cuda_manage_driver: true (upgrade and reboot) or "
        "cuda_compat: true (compatibility libraries)." in output
    )
    for rank in old.ranks:
        assert "570.148.08-1" in rank.run("dpkg-query --show nvidia-open")


def test_told_so_it_is_upgraded_and_the_hosts_are_rebooted_one_after_the_other(old):
    output = converge("-e", "cuda_manage_driver=true", expect=2)
    assert (
        "must be rebooted: driver 570.148.08 runs and 580.159.04 is installed. Reboot it, or set cuda_reboot" in output
    )
    for rank in old.ranks:
        assert "580.159.04-1" in rank.run("dpkg-query --show nvidia-open")
        assert "580.159.04-1" in rank.run("dpkg-query --show nvidia-fabricmanager-580")
        assert "570.148.08" in rank.run(RUNNING)
    output = converge("-e", "cuda_reboot=never")
    assert "rank1 must be rebooted: driver 570.148.08 runs and 580.159.04 is installed." in output
    boots = [rank.run(BOOT) for rank in old.ranks]
    converge("-e", "cuda_reboot=when_needed")
    for rank, before in zip(old.ranks, boots, strict=True):
        assert "580.159.04" in rank.run(RUNNING)
        assert rank.run(BOOT) != before
    assert recap(converge()) == NOTHING


def test_compatibility_libraries_bridge_an_old_driver_that_stays(old):
    for rank in old.ranks:
        rank.run(f"{APT} purge nvidia-driver-pinning-580")
    output = converge("-e", "cuda_compat=true")
    assert "serve_environment needs LD_LIBRARY_PATH: /usr/local/cuda-13.0/compat" in output
    for rank in old.ranks:
        assert "580.159.04-1" in rank.run("dpkg-query --show cuda-compat-13-0")
        rank.run("test -e /usr/local/cuda-13.0/compat/libcuda.so.580.159.04")
        assert "570.148.08-1" in rank.run("dpkg-query --show nvidia-open")
        # The repository that came with the libraries has newer drivers.
        assert "Candidate: 570.148.08-1" in rank.run("apt-cache policy nvidia-open")
    assert recap(converge("-e", "cuda_compat=true")) == NOTHING
    converge("-e", "cuda_manage_driver=true", "-e", "cuda_reboot=when_needed")
    for rank in old.ranks:
        assert "Candidate: 580.159.04-1" in rank.run("apt-cache policy nvidia-open")


def test_unattended_upgrades_leave_the_driver_alone(replica):
    rank = replica.ranks[0]
    rank.run(f"{APT} install unattended-upgrades")
    assert recap(converge()) == [("rank0", "1", "0"), ("rank1", "0", "0")]
    assert '"^nvidia-"' in rank.run("apt-config dump Unattended-Upgrade::Package-Blacklist")
    assert recap(converge()) == NOTHING


class TestElsewhere:
    """Hosts that say of themselves to be another system, and lack a package, so that the repository is looked for."""

    @pytest.fixture(scope="class")
    def become(self, replica):
        for rank in replica.ranks:
            rank.run(f"{APT} purge libnvsdm")

        def become(release):
            for rank in replica.ranks:
                rank.run(f"rm /etc/os-release && printf '{release}' > /etc/os-release")

        yield become
        # Another system than the one below is no hindrance where the repository is given.
        become('ID=ubuntu\nVERSION_ID="24.04"\n')
        converge()
        for rank in replica.ranks:
            assert "580.159.04-1" in rank.run("dpkg-query --show libnvsdm")
            rank.run("ln -sfn ../usr/lib/os-release /etc/os-release")

    @pytest.mark.parametrize(
        ("system", "version", "folder"),
        [
            ("ubuntu", "22.04", "ubuntu2204"),
            ("ubuntu", "24.04", "ubuntu2404"),
            ("debian", "12", "debian12"),
            ("debian", "13", "debian13"),
        ],
    )
    def test_every_system_has_its_repository(self, become, system, version, folder):
        become(f'ID={system}\nVERSION_ID="{version}"\n')
        # The module knows no diff; at -v it says what it would write.
        output = converge("--check", "-v", "-e", "cuda_repository_url=")
        assert f"/compute/cuda/repos/{folder}/x86_64/" in output

    def test_a_system_without_a_repository_is_told(self, become):
        become('ID=fedora\nVERSION_ID="44"\n')
        output = converge("-e", "cuda_repository_url=", expect=2)
        assert "fedora 44 has no CUDA repository that this role knows" in output


@pytest.fixture(scope="module")
def lambda_stack(replica):
    """Lambda's repository, above all others as on its machines, and its metapackage."""
    entry = "deb [signed-by=/srv/scenario-cuda/key.gpg] file:/srv/scenario-cuda/lambda /"
    pin = "Package: *\\nPin: release o=Lambda Labs\\nPin-Priority: 1001\\n"
    for rank in replica.ranks:
        rank.run(
            f"echo '{entry}' > /etc/apt/sources.list.d/scenario-lambda.list && "
            f"printf '{pin}' > /etc/apt/preferences.d/scenario-lambda && "
            f"apt-get -qq update && {APT} install lambda-stack-cuda"
        )
    return replica


def test_lambda_stack_is_recognised_and_left_in_peace(lambda_stack):
    """Also where something of it is missing: that is named, and neither it nor a repository comes from elsewhere."""
    source, aside = "/etc/apt/sources.list.d/kimi-k3-cuda.sources", "/srv/scenario-cuda/kimi-k3-cuda.sources"
    exclusion = "/etc/apt/apt.conf.d/52kimi-k3-nvidia"
    for rank in lambda_stack.ranks:
        rank.run(f"apt-mark unhold nvidia-open; mv {source} {aside}; rm -f {exclusion}")
    lambda_stack.ranks[0].run(f"{APT} install unattended-upgrades")
    lambda_stack.ranks[1].run(f"{APT} purge libnvsdm && systemctl disable --now nvidia-dcgm")
    output = converge()
    assert "rank0: Driver 580.159.04 from Lambda Stack is new enough and open: it is left alone." in output
    assert "it is left alone. libnvsdm is missing: upgrade Lambda Stack, or set cuda_manage_driver: true." in output
    assert recap(output) == NOTHING
    for rank in lambda_stack.ranks:
        rank.run(f"test ! -e {source} && test ! -e {exclusion} && mv {aside} {source}")


def test_an_old_lambda_stack_is_for_its_owner_to_upgrade(lambda_stack, old):
    output = converge(expect=2)
    assert "Lambda Stack owns it: upgrade that, or set cuda_manage_driver: true" in output
    # Its pin outranks that of NVIDIA's branch.
    output = converge("-e", "cuda_manage_driver=true", expect=2)
    assert (
        "apt would install nvidia-open 570.148.08-0lambda1, not branch 580: another pin outranks "
        "nvidia-driver-pinning-580 (apt-cache policy nvidia-open)." in output
    )
