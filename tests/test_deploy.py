"""The manifests for Kubernetes: each is one that the cluster takes, they agree with each other and with the settings,
and what KEDA is told to count is what workers would drive. compose.yaml, and the image's question after its health.

No cluster is here: the schemas of Kubernetes and of KEDA say what is taken, strictly (a field that they do not know is
an error), and tests/kustomize.py what is applied.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]
from psycopg import errors, sql

from claim_flow import cli
from flow import threads
from flow.database import Connection, connect
from flow.model import CLAIM_FLOW, CLAIM_FLOW_VERSION, flow_key
from flow.policy import policy_of
from flow.settings import Settings, read_settings
from tests.command import ROOT, Terminal
from tests.kustomize import Manifest, build, documents, pod_of
from tests.local_slack import free_port
from tests.people import ask, start_claim
from tests.rows import all_rows, until, value
from tests.services import is_ready

DEPLOY = ROOT / "deploy"
FOLDERS = [DEPLOY / "base", DEPLOY / "overlays" / "production"]
SECRETS = documents(DEPLOY / "secrets.example.yaml")
SETTINGS = {name.upper() for name in Settings.model_fields}

# What kustomize appends to the names of what it generates.
_HASH = rb"(claim-flow-(?:settings|policy))-[a-z0-9]{10}\b"

# The newest that the validator knows, and the oldest that the manifests are for.
KUBERNETES = ["1.37", "1.32"]


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def objects(request: pytest.FixtureRequest) -> list[Manifest]:
    return build(request.param)


def of_kind(objects: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def pods(objects: list[Manifest]) -> dict[str, Manifest]:
    """The pod's spec of everything that makes pods, by its name."""
    return {each["metadata"]["name"]: pod for each in objects if (pod := pod_of(each))}


def labels(objects: list[Manifest]) -> list[dict[str, str]]:
    return [each["spec"]["template"]["metadata"]["labels"] for each in objects if pod_of(each)]


# Upgrades


def test_an_upgrade_waits_for_the_end_of_all_that_writes_before_it_notes_the_head(objects: list[Manifest]) -> None:
    page = (ROOT / "docs" / "scaling.md").read_text()
    before = page.partition("### Upgrade\n")[2].partition("# note the audit's head")[0]
    waits = r"wait --for=delete pod --selector=app\.kubernetes\.io/component=(\w+) --timeout=(\d+)s"
    waited = {component: int(seconds) for component, seconds in re.findall(waits, before)}
    deployed = [each["spec"]["template"] for each in of_kind(objects, "Deployment").values()]
    patience = {
        each["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"]["terminationGracePeriodSeconds"]
        for each in deployed
    }
    assert waited.keys() == patience.keys()
    assert all(waited[component] > patience[component] for component in patience)


# What a cluster takes


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_is_one_that_the_cluster_takes(objects: list[Manifest], version: str) -> None:
    for each in [*objects, *SECRETS]:
        if each["apiVersion"].startswith("keda.sh/"):
            jsonschema.Draft202012Validator(_keda(each["kind"])).validate(each)
        else:
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("kind", ["Deployment", "ScaledObject"])
def test_a_field_that_does_not_exist_is_found(kind: str) -> None:
    [*_, each] = of_kind(build(FOLDERS[0]), kind).values()
    each["spec"]["replicaz"] = 2
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        if kind == "ScaledObject":
            jsonschema.Draft202012Validator(_keda(kind)).validate(each)
        else:
            kubernetes_validate.validate(each, KUBERNETES[0], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_kubectl_would_apply_the_same(folder: Path) -> None:
    """Where it is installed: our reader of kustomizations reads them as the real one does, hashes in names aside."""
    made = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, check=True, timeout=60)
    real = list(yaml.safe_load_all(re.sub(_HASH, rb"\1", made.stdout)))
    by_name = [sorted(objects, key=lambda o: (o["kind"], o["metadata"]["name"])) for objects in (build(folder), real)]
    assert by_name[0] == by_name[1]


def test_every_file_is_applied_or_an_example() -> None:
    used = {DEPLOY / "secrets.example.yaml"}
    for folder in FOLDERS:
        [kustomization] = documents(folder / "kustomization.yaml")
        generated = [name for g in kustomization["configMapGenerator"] for name in g.get("envs", g.get("files"))]
        patches = [patch["path"] for patch in kustomization.get("patches", ())]
        used |= {folder / name for name in ["kustomization.yaml", *kustomization["resources"], *generated, *patches]}
    assert {path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".sql"} <= used


def test_the_names_of_the_images_are_the_overlays() -> None:
    images = {c["image"] for pod in pods(build(FOLDERS[1])).values() for c in pod["containers"]}
    assert images == {"registry.example.com/claim-flow:0.1.0"}


# They agree with each other


def test_whatever_selects_pods_finds_some(objects: list[Manifest]) -> None:
    selectors: list[dict[str, str]] = []
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            selectors.append(spec["selector"])
        elif each["kind"] == "NetworkPolicy":
            selectors.append(spec["podSelector"]["matchLabels"])
        elif each["kind"] in ("Deployment", "PodDisruptionBudget"):
            selectors.append(spec["selector"]["matchLabels"])
        if pod := pod_of(each):
            spread = pod.get("topologySpreadConstraints", ())
            selectors += [one["labelSelector"]["matchLabels"] for one in spread]
    assert len(selectors) == 10
    for selector in selectors:
        assert any(selector.items() <= own.items() for own in labels(objects)), selector


def test_a_deployment_selects_its_own_pods_and_no_others(objects: list[Manifest]) -> None:
    for each in of_kind(objects, "Deployment").values():
        selector = each["spec"]["selector"]["matchLabels"]
        assert [own for own in labels(objects) if selector.items() <= own.items()] == [
            each["spec"]["template"]["metadata"]["labels"]
        ]


def test_every_port_that_is_named_is_a_containers(objects: list[Manifest]) -> None:
    found = pods(objects)
    for name, pod in found.items():
        for container in pod["containers"]:
            own = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
            probes = [container[probe]["httpGet"] for probe in container if probe.endswith("Probe")]
            assert {probe["port"] for probe in probes} <= own.keys()
            assert {probe["path"] for probe in probes} <= {"/healthz", "/readyz"}
            listens = {e["name"]: e["value"] for e in container.get("env", ())}
            names = {"PORT": "http", "HEALTH_PORT": "health"}
            assert own == {names[setting]: int(port) for setting, port in listens.items() if setting in names}, name
    for each in of_kind(objects, "Service").values():
        assert {port["targetPort"] for port in each["spec"]["ports"]} == {"http"}
    let_in = [rule for each in of_kind(objects, "NetworkPolicy").values() for rule in each["spec"].get("ingress", ())]
    assert {port["port"] for rule in let_in for port in rule["ports"]} == {"http", "health"}


def test_nothing_refers_to_what_is_not_there(objects: list[Manifest]) -> None:
    maps, secrets = of_kind(objects, "ConfigMap"), of_kind(SECRETS, "Secret")
    for pod in pods(objects).values():
        assert pod["serviceAccountName"] in of_kind(objects, "ServiceAccount")
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {v["configMap"]["name"] for v in volumes.values() if "configMap" in v} <= maps.keys()
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
            for source in container["envFrom"]:
                if "secretRef" in source:
                    assert source["secretRef"]["name"] in secrets
                else:
                    assert source["configMapRef"]["name"] in maps
    for each in of_kind(objects, "TriggerAuthentication").values():
        for target in each["spec"]["secretTargetRef"]:
            assert target["key"] in secrets[target["name"]]["stringData"]
    for each in of_kind(objects, "ScaledObject").values():
        deployment = of_kind(objects, "Deployment")[each["spec"]["scaleTargetRef"]["name"]]
        # Each apply would undo what KEDA has found.
        assert "replicas" not in deployment["spec"]
        asks = {trigger["authenticationRef"]["name"] for trigger in each["spec"]["triggers"]}
        assert asks == of_kind(objects, "TriggerAuthentication").keys()


def test_no_secret_is_applied(objects: list[Manifest]) -> None:
    assert not of_kind(objects, "Secret")


# They agree with the program


def test_every_name_in_the_environment_is_a_setting(objects: list[Manifest]) -> None:
    for secret in SECRETS:
        assert secret["stringData"].keys() <= SETTINGS
    assert of_kind(objects, "ConfigMap")["claim-flow-settings"]["data"].keys() <= SETTINGS
    for pod in pods(objects).values():
        for container in pod["containers"]:
            assert {each["name"] for each in container.get("env", ())} <= SETTINGS


def test_the_settings_are_usable(objects: list[Manifest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    maps = of_kind(objects, "ConfigMap")
    policy = tmp_path / "policy.toml"
    policy.write_text(maps["claim-flow-policy"]["data"]["policy.toml"])
    given = maps["claim-flow-settings"]["data"]
    assert given["POLICY_FILE"] == "/etc/claim-flow/policy.toml"
    secret = of_kind(SECRETS, "Secret")["claim-flow"]["stringData"] if "SLACK_CHANNEL" in given else {}
    for name, text in (secret | given | {"POLICY_FILE": str(policy)}).items():
        monkeypatch.setenv(name, text)
    policy_of(Settings())
    assert all("/etc/claim-flow" in _mounts(pod) for name, pod in pods(objects).items() if name != "claim-flow-setup")


def test_the_arguments_are_commands(objects: list[Manifest]) -> None:
    said = {name: container["args"] for name, pod in pods(objects).items() for container in pod["containers"]}
    assert said == {"claim-flow-bot": ["bot"], "claim-flow-worker": ["work"], "claim-flow-setup": ["setup"]}
    assert all(command in cli.commands for [command] in said.values())


def test_a_worker_has_longer_to_end_than_a_drive_may_take(objects: list[Manifest]) -> None:
    given = of_kind(objects, "ConfigMap")["claim-flow-settings"]["data"]
    assert float(given["DRIVE_TIMEOUT"]) == Settings.model_fields["drive_timeout"].default
    assert pods(objects)["claim-flow-worker"]["terminationGracePeriodSeconds"] >= float(given["DRIVE_TIMEOUT"]) + 30


def test_keda_counts_on_as_many_drives_as_a_worker_has(objects: list[Manifest]) -> None:
    stand_by = int(of_kind(objects, "ConfigMap")["claim-flow-settings"]["data"]["STAND_BY"])
    scaled = of_kind(objects, "ScaledObject")["claim-flow-worker"]["spec"]
    [trigger] = scaled["triggers"]
    assert float(trigger["metadata"]["targetQueryValue"]) == stand_by
    # Without a worker nobody expires, reminds or seals.
    assert scaled["minReplicaCount"] >= 1
    # What is counted at most is more than what the most workers can drive.
    assert f"LIMIT {2 * stand_by * scaled['maxReplicaCount']})" in trigger["metadata"]["query"]


def test_no_pod_may_more_than_it_must(objects: list[Manifest]) -> None:
    user = int(_only_line("RUN useradd ").split("--uid ")[1].split()[0])
    for pod in pods(objects).values():
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert pod["automountServiceAccountToken"] is pod["enableServiceLinks"] is False
        assert "/tmp" in _mounts(pod)
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]


# compose.yaml


def test_with_compose_bot_and_worker_have_the_same_settings_but_for_their_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in MAILS.items():
        monkeypatch.setenv(name, text)
    found = {}
    for name in ("bot", "worker"):
        with monkeypatch.context() as inside:
            for setting, text in composed(name).items():
                inside.setenv(setting, text)
            found[name] = read_settings().model_dump(exclude={"host", "port", "health_port"})
    assert found["bot"] == found["worker"]
    assert found["worker"]["public_url"] == "http://127.0.0.1:4000"


# What .env has: neither a word of PUBLIC_URL.
MAILS = {"SMTP_URL": "smtp://mail.example.com", "MAIL_FROM": "claims@example.com"}


def composed(service: str) -> dict[str, str]:
    """What compose.yaml adds to the environment of a service, where .env says nothing about it."""
    [compose] = documents(ROOT / "compose.yaml")
    given = compose["services"][service]["environment"]
    return {name: re.sub(r"\$\{\w+:[-?](.*?)\}", r"\1", str(text)) for name, text in given.items()}


# The image's health


@pytest.mark.parametrize("command", ["serve", "bot", "work"])
async def test_the_image_is_healthy_while_its_command_is_ready_whatever_port_that_is(
    conn: Connection, database_url: str, tmp_path: Path, command: str
) -> None:
    port, health_port = free_port(), free_port()
    settings = {"PORT": str(port), "HEALTH_PORT": str(health_port), "STAND_BY": "1"}
    # That of a company, which does not lead back here.
    settings["http_proxy"] = f"http://127.0.0.1:{free_port()}"
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, **settings)
    assert not await asyncio.to_thread(is_healthy, terminal)
    async with terminal.service(command) as running:

        async def ready() -> bool:
            return await is_ready(health_port if command == "work" else port)

        await running.until(ready)
        assert await asyncio.to_thread(is_healthy, terminal)


async def test_the_image_is_unhealthy_while_its_command_is_not_ready(tmp_path: Path) -> None:
    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = str(server.sockets[0].getsockname()[1])
        for setting, other in (("PORT", "HEALTH_PORT"), ("HEALTH_PORT", "PORT")):
            terminal = Terminal(tmp_path, **{setting: port, other: str(free_port())})
            assert not await asyncio.to_thread(is_healthy, terminal)


def is_healthy(terminal: Terminal) -> bool:
    """What the HEALTHCHECK of the Dockerfile says, in this environment."""
    [check] = re.findall(r"^HEALTHCHECK .*?\\\n +CMD (.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    asked = subprocess.run(["sh", "-c", check], env=terminal.environment, capture_output=True, check=False, timeout=30)
    return asked.returncode == 0


# A root that is read-only


def _mounts_are_to_be_had() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    made = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return made.returncode == 0


@pytest.mark.skipif(not _mounts_are_to_be_had() and "CI" not in os.environ, reason="mounting needs root")
async def test_no_command_of_the_manifests_writes_anywhere_but_to_tmp(
    conn: Connection, database_url: str, tmp_path: Path
) -> None:
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    port = free_port()
    terminal = Terminal(tmp_path, DATABASE_URL=database_url, PORT=str(port), TMPDIR=str(tmp), HOME="/app")
    script = (
        'mount --make-rprivate / && mount -o remount,bind,ro / && mount -t tmpfs -o size=64m tmpfs "$1" || exit 9;'
        ' ! touch "$1/../x" 2>/dev/null || exit 9; shift; exec "$@"'
    )
    read_only = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp), sys.executable, str(ROOT / "claim_flow.py")]
    run = partial(subprocess.Popen, cwd=tmp_path, env=terminal.environment)
    await start_claim(conn, amount="20")
    with (tmp_path / "out").open("wb") as out:
        with run([*read_only, "bot"], stdout=out, stderr=out) as bot:
            try:

                async def ready() -> bool:
                    assert bot.poll() is None, (tmp_path / "out").read_text()
                    return await is_ready(port)

                await until(ready, within_s=60)
            finally:
                bot.terminate()
        for command in (["setup"], ["work", "--once"]):
            with run([*read_only, *command], stdout=out, stderr=out) as running:
                assert running.wait(60) == 0, (tmp_path / "out").read_text()
    assert await value(conn, "SELECT status FROM threads") == "paid"


# What KEDA counts


@pytest.fixture
def query() -> str:
    [trigger] = of_kind(build(FOLDERS[0]), "ScaledObject")["claim-flow-worker"]["spec"]["triggers"]
    return str(trigger["metadata"]["query"])


@pytest.fixture
async def standing(conn: Connection) -> Connection:
    """Threads in every state that a worker may find them in."""
    for thread_id in ("due", "held", "put-off", "stuck", "unavailable"):
        await start_claim(conn, thread_id, "20")
    await conn.execute("UPDATE threads SET attempts = 8 WHERE thread_id = 'put-off'")
    await threads.put_off(conn, "put-off", "the bank is closed")
    await conn.execute("UPDATE threads SET attempts = %s WHERE thread_id = 'stuck'", (threads.MAX_ATTEMPTS,))
    await threads.put_off(conn, "stuck", "the bank is gone")
    await threads.set_aside(conn, "unavailable")
    await ask(conn, "waiting")
    await start_claim(conn, "over", "20")
    await conn.execute("UPDATE threads SET status = 'failed', due_at = NULL WHERE thread_id = 'over'")
    assert await threads.try_lock(conn, "held")
    return conn


async def test_keda_counts_what_workers_drive_and_have_to_drive(
    standing: Connection, database_url: str, query: str
) -> None:
    flow = flow_key(CLAIM_FLOW, CLAIM_FLOW_VERSION)
    due = await threads.due_threads(standing, flows=[flow], drive_timeout_s=120.0, limit=100)
    assert {each.thread_id: each.held for each in due} == {"due": False, "held": True}
    assert await _counted(database_url, query) == len(due)


async def test_nothing_is_counted_once_a_worker_has_driven_it(
    standing: Connection, database_url: str, query: str, tmp_path: Path
) -> None:
    await threads.unlock(standing, "held")
    done = await Terminal(tmp_path, DATABASE_URL=database_url).run_meanwhile("work", "--once")
    assert done.code == 0, done.err
    assert (
        await value(standing, "SELECT count(*) FROM threads WHERE thread_id IN ('due', 'held') AND status = 'paid'")
        == 2
    )
    assert await _counted(database_url, query) == 0


async def test_keda_needs_no_right_but_to_see_when_threads_are_due(
    standing: Connection, database_url: str, query: str
) -> None:
    comment = (DEPLOY / "secrets.example.yaml").read_text()
    [grant] = re.findall(r"a role with (GRANT .*)\.$", comment, re.MULTILINE)
    role = sql.Identifier(f"due_{uuid.uuid4().hex[:8]}")
    await standing.execute(sql.SQL("CREATE ROLE {}").format(role))
    try:
        await standing.execute(sql.SQL("{} TO {}").format(sql.SQL(grant), role))
        async with await connect(database_url, "door") as keda:
            await keda.execute(sql.SQL("SET ROLE {}").format(role))
            assert await value(keda, query) == 2
            with pytest.raises(errors.InsufficientPrivilege):
                await keda.execute("SELECT input FROM threads")
    finally:
        await standing.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(role), prepare=False)


async def test_what_keda_asks_every_few_seconds_reads_the_index_of_what_is_due(conn: Connection, query: str) -> None:
    await conn.execute(
        "INSERT INTO threads (thread_id, flow, flow_version, input, requested_by, status, due_at)"
        " SELECT 'x' || g, 'claim', '1', '{}', 'ann', CASE WHEN g <= 200 THEN 'running' ELSE 'failed' END,"
        " CASE WHEN g <= 200 THEN clock_timestamp() END FROM generate_series(1, 20000) AS g"
    )
    await conn.execute("VACUUM ANALYZE threads")
    plan = str(await all_rows(conn, f"EXPLAIN {query}"))
    assert "threads_due" in plan and "Seq Scan" not in plan, plan
    assert await value(conn, query) == 80


async def _counted(url: str, query: str) -> int:
    """As KEDA asks: on a connection of its own."""
    async with await connect(url, "door") as conn:
        return int(await value(conn, query))


def _keda(kind: str) -> dict[str, Any]:
    """KEDA's own schema, which takes no field that it does not have."""
    schema: dict[str, Any] = json.loads((ROOT / "tests" / "keda" / f"{kind}.json").read_text())
    for each in _schemas(schema):
        if "properties" in each:
            each.setdefault("additionalProperties", False)
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _schemas(each)


def _mounts(pod: Manifest) -> set[str]:
    return {mount["mountPath"] for container in pod["containers"] for mount in container["volumeMounts"]}


def _only_line(start: str) -> str:
    [line] = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith(start)]
    return line
