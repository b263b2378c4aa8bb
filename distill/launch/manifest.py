"""The Kubernetes objects of a run: its token, its files, its volume, and a JobSet with a Job for each role.

A Job gives a pod that dies another one, `run.restarts` times a role; the run ends with the controller's Job.
What a pod keeps for itself lies in a folder of its node. The run's folder is on a volume, for the roles that
leave something there: controller, trainer and evaluator, and those that read weights from a folder.
JobSet's own RestartJob is not used: clusters refuse it unless its feature gate, an alpha, is on.
"""

from __future__ import annotations

import math
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

import yaml

from distill.config import RunConfig
from distill.topology import CONTROLLER, TRAINER
from sync.base.address import TOKEN_FILE_VARIABLE, token_from_environment

CONFIG_FOLDER: Final = "/config"
"""Where pods find the configuration and the files that travel with it."""
PORT: Final = 8000
"""Of every server: each pod has an address of its own."""
LOOK_SECONDS: Final = 10
"""Between two probes of a server."""
_TOKEN_FOLDER: Final = "/var/run/distill"
REMOTE: Final = ("bucket", "object")
_RUN_ENDED: Final = [1, 2, 130]
"""Exit statuses of the controller that are its own word: no other pod goes on after it."""
_RESUMED: Final = """\
if [ -e {run_dir}/run.db ] || [ -d {run_dir}/journal ]; then set -- "$@" --resume; fi
exec "$@"
"""
"""Shell: run a command, and go on with the run if it has begun."""
_LOST: Final = """\
"$@" &
trap "kill $!; wait $!; exit 143" TERM
wait $!
"""
"""Shell: run a command which ends in order, with status 0, at SIGTERM: a pod that is evicted so is not one
that is done, and gets a successor."""


@dataclass(frozen=True)
class Target:
    """Where a run goes."""

    image: str
    """Has this project installed, and `distill` on its path."""
    namespace: str | None = None
    """None: kubectl's."""
    volume: str | None = None
    """A claim that exists; None: one is made, `storage` large."""
    keeps: bool = True
    """False: no volume at all; what a pod wrote ends with it."""
    storage: str = "500Gi"
    gpus: bool = True
    """False: no pod asks for any."""
    secret: str | None = None
    """A Secret that exists, whose keys become variables of every pod, such as HF_TOKEN."""


class Role(NamedTuple):
    """The pods of one Job."""

    name: str
    words: list[str]
    """Of `distill`."""
    pods: int = 1
    gpus: int = 0
    serves: bool = True
    """At PORT."""
    keeps: bool = False
    """It writes what outlasts it into the run's folder."""
    follows: bool = False
    """It reads published weights."""
    reads: bool = False
    """Models or files of it lie on the volume."""


@dataclass(frozen=True)
class Manifest:
    """The objects of one run."""

    name: str
    """Of each of them."""
    config: RunConfig
    target: Target
    folder: PurePosixPath
    """Where the volume of the run's folder is mounted."""

    def text(self, files: Mapping[str, str], roles: Sequence[Role]) -> str:
        """All objects as YAML; `files`: what pods find in CONFIG_FOLDER."""
        objects = self._objects(files, roles)
        return "---\n".join(
            str(yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True))
            for document in objects
        )

    def _objects(self, files: Mapping[str, str], roles: Sequence[Role]) -> Iterator[dict[str, Any]]:
        token = token_from_environment() or secrets.token_urlsafe(32)
        yield self._object("v1", "Secret", type="Opaque", stringData={"token": token})
        yield self._object("v1", "ConfigMap", data=files)
        if self.target.keeps and self.target.volume is None:  # many nodes write to it
            asked = {"requests": {"storage": self.target.storage}}
            claim = {"accessModes": ["ReadWriteMany"], "resources": asked}
            yield self._object("v1", "PersistentVolumeClaim", spec=claim)
        jobs = [{"name": role.name, "replicas": 1, "template": {"spec": self._job(role)}} for role in roles]
        spec = {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [CONTROLLER]},
            "failurePolicy": {"maxRestarts": 0, "rules": [{"name": "no_pod_left", "action": "FailJobSet"}]},
            "replicatedJobs": jobs,
        }
        yield self._object("jobset.x-k8s.io/v1alpha2", "JobSet", spec=spec)

    def _object(self, version: str, kind: str, **rest: Any) -> dict[str, Any]:
        where = {"namespace": self.target.namespace} if self.target.namespace else {}
        return {"apiVersion": version, "kind": kind, "metadata": {"name": self.name, **where}, **rest}

    def _job(self, role: Role) -> dict[str, Any]:
        """A Job that gives a pod which dies another one; evicted ones do not count.

        A trainer's machine that is lost ends the ranks of the others, which count too.
        """
        lost = role.name == CONTROLLER and not self.target.keeps  # its record, with its pod
        deaths = self.config.run.restarts * (role.pods if role.name == TRAINER else 1)
        evicted = [{"type": "DisruptionTarget", "status": "True"}]
        rules: list[dict[str, Any]] = [{"action": "Ignore", "onPodConditions": evicted}]
        if role.name == CONTROLLER:
            rules.append({"action": "FailJob", "onExitCodes": {"operator": "In", "values": _RUN_ENDED}})
        return {
            "parallelism": role.pods,
            "completions": role.pods,
            "completionMode": "Indexed",
            "backoffLimit": 0 if lost else deaths,
            "podFailurePolicy": {"rules": rules},
            "template": {"spec": self._pod(role)},
        }

    def _pod(self, role: Role) -> dict[str, Any]:
        target = self.target
        volumes, mounts = self._disk(role)
        run_dir = shlex.quote(str(self.folder / self.config.run.name))
        script = _RESUMED.format(run_dir=run_dir) if role.name == CONTROLLER else _LOST
        container: dict[str, Any] = {
            "name": "role",
            "image": target.image,
            "command": ["sh", "-c", script, "sh"],
            "args": ["distill", *role.words],
            "env": [{"name": TOKEN_FILE_VARIABLE, "value": f"{_TOKEN_FOLDER}/token"}],
            **({"envFrom": [{"secretRef": {"name": target.secret}}]} if target.secret else {}),
            **({"resources": {"limits": {"nvidia.com/gpu": role.gpus}}} if role.gpus else {}),
            **(_probes(self.config) if role.serves else {}),
            "volumeMounts": mounts,
        }
        return {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": math.ceil(self.config.run.grace_seconds),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # a service called "vllm" would set VLLM_PORT
            "containers": [container],
            "volumes": volumes,
        }

    def _disk(self, role: Role) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Volumes and mounts: the run's folder is the claim where a role needs that, else its node's."""
        name, folder = self.name, str(self.folder)
        volumes: list[dict[str, Any]] = [
            {"name": "config", "configMap": {"name": name}},
            {"name": "token", "secret": {"secretName": name, "defaultMode": 0o400}},
        ]
        mounts = [
            {"name": "config", "mountPath": CONFIG_FOLDER},
            {"name": "token", "mountPath": _TOKEN_FOLDER},
        ]
        follows = role.follows and reads_volume(self.config)
        run_dir = self.folder / self.config.run.name
        node: PurePosixPath | None = self.folder
        if self.target.keeps and (role.keeps or role.reads or follows):
            claim = {"claimName": self.target.volume or name}
            volumes.append({"name": "run", "persistentVolumeClaim": claim})
            mounts.append({"name": "run", "mountPath": folder})
            mirror = self.config.student.mirror_folder
            mirrors = run_dir / "mirrors" if mirror is None else PurePosixPath(mirror)
            node = mirrors if role.follows else None if role.keeps else run_dir
        if node is not None:  # what it reads and writes all the time, and nobody else does
            volumes.append({"name": "node", "emptyDir": {}})
            mounts.append({"name": "node", "mountPath": str(node)})
        if role.gpus or role.name == TRAINER:  # NCCL, vLLM and DeepSpeed share memory there
            volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
            mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        return volumes, mounts


def reads_volume(config: RunConfig) -> bool:
    """Whether published weights lie in the run's folder."""
    return config.uses_store and config.weights.store.type not in REMOTE


def _probes(config: RunConfig) -> dict[str, Any]:
    """The times of run.start_seconds and run.health_timeout_seconds."""

    def probe(seconds: float) -> dict[str, Any]:
        times = {"periodSeconds": LOOK_SECONDS, "timeoutSeconds": LOOK_SECONDS}
        failures = max(1, math.ceil(seconds / LOOK_SECONDS))
        return {"httpGet": {"path": "/health", "port": PORT}, **times, "failureThreshold": failures}

    health = config.run.health_timeout_seconds
    return {
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": probe(config.run.start_seconds),
        "readinessProbe": probe(LOOK_SECONDS),
        **({"livenessProbe": probe(health)} if health else {}),
    }


class _Dumper(yaml.SafeDumper):
    """Blocks for texts of several lines, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)
