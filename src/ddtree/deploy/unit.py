"""The systemd unit of a deployment: hardened, but with the GPUs and the run-time compilers that engines need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ddtree.deploy.deployment import Deployment

HEADER = "# Rendered by ddtree: change the deployment file, not this."
STOPPED_BY_SIGTERM = 143
"""Exit code that some engines give after an ordinary stop."""
MAKE_DEVICES = ("-+/usr/bin/nvidia-smi -L", "-+/usr/bin/nvidia-modprobe -u -c 0")
"""Under NoNewPrivileges the driver's own set-uid helper cannot make the device files: root makes them before."""


def render_unit(
    deployment: Deployment,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    environment_file: str | None,
    credentials: Mapping[str, str],
) -> str:
    """The unit's text; the same for the same deployment, and without any secret.

    Args:
        command: argument by argument; the first one is a path from /.
        environment: what may be read by everyone.
        environment_file: file of mode 0600 with the secret variables, or None.
        credentials: name of each credential to the file of mode 0600 that holds it.
    """
    service = deployment.service
    on_gpu = deployment.runtime.device == "cuda"
    unit = [
        (
            "Description",
            _plain(service.description or f"{deployment.served_name} by {deployment.engine.kind} (ddtree)"),
        ),
        ("Documentation", "https://arxiv.org/abs/2604.12989"),
        ("Wants", "network-online.target"),
        ("After", "network-online.target" + (" nvidia-persistenced.service" if on_gpu else "")),
        ("StartLimitIntervalSec", "600"),
        ("StartLimitBurst", str(service.max_restarts)),
    ]
    run = [
        ("Type", "exec"),
        *([("ExecStartPre", command) for command in MAKE_DEVICES] if on_gpu else []),
        # The colon leaves '$' alone: arguments are what they are.
        ("ExecStart", ":" + " ".join(_quoted(argument) for argument in command)),
        *[("Environment", _quoted(f"{name}={value}")) for name, value in environment.items()],
        *([("EnvironmentFile", environment_file)] if environment_file else []),
        *[("LoadCredential", f"{name}:{_plain(path)}") for name, path in credentials.items()],
        *([("User", service.user)] if service.user else [("DynamicUser", "yes")]),
        ("WorkingDirectory", f"/var/cache/{cache_folder(deployment)}"),
        ("CacheDirectory", cache_folder(deployment)),
        ("CacheDirectoryMode", "0700"),
        ("UMask", "0077"),
    ]
    life = [
        ("Restart", deployment.restart),
        ("RestartSec", f"{service.restart_delay_s:g}"),
        ("KillMode", "mixed"),
        ("TimeoutStartSec", "300"),  # until the program runs, not until it is ready
        ("TimeoutStopSec", f"{service.stop_timeout_s:g}"),
        ("SuccessExitStatus", str(STOPPED_BY_SIGTERM)),
        *_log(service.log),
    ]
    limits = [
        ("LimitNOFILE", str(service.open_files)),
        ("LimitMEMLOCK", "infinity"),
        ("LimitCORE", "0"),
        *([("MemoryMax", str(int(service.memory_max_gib * 2**30)))] if service.memory_max_gib else []),
        *([("CPUQuota", f"{service.cpu_quota_percent}%")] if service.cpu_quota_percent else []),
        ("TasksMax", str(service.tasks_max or "infinity")),
    ]
    text = [
        HEADER,
        *_section("Unit", unit),
        *_section("Service", [*run, *life, *limits, *_hardening(on_gpu, service.read_write_paths)]),
        *(_section("Install", [("WantedBy", "multi-user.target")]) if service.enabled else []),
    ]
    return "\n".join(text) + "\n"


def cache_folder(deployment: Deployment) -> str:
    """Below /var/cache: the one folder that the service may write, and its home."""
    return f"ddtree/{deployment.name}"


def _hardening(on_gpu: bool, writable: Iterable[str]) -> list[tuple[str, str]]:
    """What a server of models does not need. Left out on purpose: MemoryDenyWriteExecute (kernels are compiled at run
    time), ProcSubset=pid (the driver reads /proc/driver), PrivateIPC and a closed DevicePolicy (NCCL, GPUs), and the
    system calls that GPUs of one host share memory by."""
    return [
        ("NoNewPrivileges", "yes"),
        ("CapabilityBoundingSet", ""),
        ("AmbientCapabilities", ""),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "read-only"),
        *[("ReadWritePaths", _quoted(path)) for path in writable],
        ("PrivateTmp", "yes"),
        *([] if on_gpu else [("PrivateDevices", "yes")]),
        ("ProtectKernelTunables", "yes"),
        ("ProtectKernelModules", "yes"),
        ("ProtectKernelLogs", "yes"),
        ("ProtectControlGroups", "yes"),
        ("ProtectClock", "no" if on_gpu else "yes"),  # yes closes the devices
        ("ProtectHostname", "yes"),
        ("ProtectProc", "invisible"),
        ("RestrictAddressFamilies", "AF_UNIX AF_INET AF_INET6 AF_NETLINK"),
        ("RestrictNamespaces", "yes"),
        ("RestrictRealtime", "yes"),
        ("RestrictSUIDSGID", "yes"),
        ("LockPersonality", "yes"),
        ("SystemCallArchitectures", "native"),
        ("SystemCallFilter", "~@clock @cpu-emulation @module @mount @obsolete @raw-io @reboot @swap"),
        ("SystemCallErrorNumber", "EPERM"),
    ]


def _log(target: str | None) -> list[tuple[str, str]]:
    where = "journal" if target in (None, "journal") else f"append:{_plain(str(target))}"
    return [("StandardOutput", where), ("StandardError", where)]


def _section(name: str, settings: Iterable[tuple[str, str]]) -> list[str]:
    return ["", f"[{name}]", *[f"{key}={value}" for key, value in settings]]


def _plain(text: str) -> str:
    """For settings that are not split into words: only the specifiers' mark means something."""
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """One word of a setting that is split into words."""
    escaped = _plain(word).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"' if not escaped or set(escaped) & set(" \t'\"\\;#") else escaped
