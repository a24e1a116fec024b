"""The examples for Ray, on a cluster of several nodes on this machine, of which one is killed."""

import concurrent.futures
import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT

ray = pytest.importorskip("ray", reason="the package ray is not installed: THE EXAMPLES FOR RAY ARE NOT TESTED")
httpx = pytest.importorskip("httpx", reason="the package httpx is not installed: THE EXAMPLES FOR RAY ARE NOT TESTED")

import forebay  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

MODEL = str(ROOT / "models" / "tales-moe-sticky-Q4_K_M.gguf")
PROMPTS = [f"Once upon a time, {number} little foxes" for number in range(2, 26)]
ENGINE = {"device": "cpu", "threads": 1, "parallel": 4, "context": 256}
REQUEST = {"max_tokens": 12, "temperature": 0.0}


@pytest.fixture(scope="module")
def expected():
    with forebay.Engine(MODEL, **ENGINE) as engine:
        return [answer.text for answer in engine.batch(PROMPTS, **REQUEST)]


@pytest.fixture
def cluster(monkeypatch):
    """A head node for everything but engines, and two nodes with room for an engine each."""
    examples = str(ROOT / "examples")
    monkeypatch.syspath_prepend(examples)
    monkeypatch.setenv("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    # Ray Data's thread that counts usage runs until the process ends. If it asks a cluster that is shut down, Ray ends the process.
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes = [made.add_node(num_cpus=2) for _ in range(2)]
    ray.init(address=made.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": examples}})
    try:
        yield made, nodes
    finally:
        ray.shutdown()
        made.shutdown()
        sys.modules.pop("ray_data", None)
        sys.modules.pop("ray_serve", None)


def lose(made, node):
    """Remove a node of a cluster with all its processes, as if a machine lost its power.

    Ray kills the node's own processes; its workers would answer requests until they notice that.
    """
    raylet = node.all_processes["raylet"][0].process.pid
    workers = [int(pid) for task in Path(f"/proc/{raylet}/task").iterdir() for pid in (task / "children").read_text().split()]
    assert workers, "the node has no workers"
    made.remove_node(node, allow_graceful=False)
    for pid in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_batch_loses_no_prompt_with_a_machine(cluster, expected):
    import ray_data

    made, nodes = cluster
    rows = [{"number": number, "prompt": prompt} for number, prompt in enumerate(PROMPTS)]
    answers = ray_data.answered(ray.data.from_items(rows), MODEL, ENGINE, REQUEST, num_cpus=2, concurrency=2, batch_size=2)
    found = {}
    for row in answers.iter_rows():
        if not found:
            lose(made, nodes[0])
        found[row["number"]] = row
    assert [found[number]["answer"] for number in range(len(PROMPTS))] == expected
    assert all(row["tokens"] == 12 and row["finish_reason"] == "length" for row in found.values())


def test_an_answer_that_fails_does_not_stop_the_others(cluster):
    import ray_data

    rows = [{"prompt": "Once upon a time"}, {"prompt": "word " * 400}]
    answers = ray_data.answered(ray.data.from_items(rows), MODEL, ENGINE, REQUEST, num_cpus=2, batch_size=2).take_all()
    good, bad = sorted(answers, key=lambda row: len(row["prompt"]))
    assert good["answer"] and not good["error"]
    assert "context" in bad["error"] and not bad["answer"]


def ask(address, content, stream=False, begun=lambda: None, **options):
    """Return the text of an answer, or None if the stream broke off or the answer is an error of the server.

    `begun` is called at each part of a stream.
    """
    body = {"messages": [{"role": "user", "content": content}], "stream": stream, "temperature": 0, **options}
    if not stream:
        response = httpx.post(address, json=body, timeout=120)
        return response.json()["choices"][0]["message"]["content"] if response.status_code == 200 else None
    text = ""
    try:
        with httpx.stream("POST", address, json=body, timeout=120) as response:
            if response.status_code != 200:
                return None
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    return text
                if line:
                    begun()
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"]["content"]
    except httpx.HTTPError:
        pass
    return None


def test_replicas_answer_and_a_lost_machine_is_told(cluster):
    import ray_serve
    from ray import serve

    made, nodes = cluster
    port = 8321
    serve.start(http_options={"host": "127.0.0.1", "port": port, "location": "HeadOnly"})
    application = ray_serve.application(
        MODEL, ENGINE, num_cpus=2, min_replicas=2, max_replicas=2, max_ongoing_requests=8
    )
    serve.run(application, blocking=False)
    address = f"http://127.0.0.1:{port}/v1/chat/completions"
    with forebay.Engine(MODEL, **ENGINE) as engine:
        whole = {content: engine.chat(content, max_tokens=24, temperature=0).text for content in PROMPTS[:8]}

    # Wrong requests.
    for body, status, words in [
        (b"{", 400, "JSON"),
        (b'{"messages": [], "colour": 1}', 400, "colour"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": -1}', 400, "temperature"),
        (b'{"messages": [{"role": "user", "content": "hi"}], "temperature": -1, "stream": true}', 400, "temperature"),
    ]:
        response = httpx.post(address, content=body, timeout=60)
        assert response.status_code == status and words in response.json()["error"]["message"], response.text
    assert httpx.get(f"http://127.0.0.1:{port}/other", timeout=60).status_code == 404

    # Both kinds of answers, by both replicas.
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        asked = [(content, pool.submit(ask, address, content, n % 2 == 0, max_tokens=24)) for n, content in enumerate(whole)]
        assert all(answer.result() == whole[content] for content, answer in asked)

        # A machine is lost while streams run. Each stream ends whole, or breaks off.
        asked = [(content, pool.submit(ask, address, content, True, max_tokens=24)) for content in list(whole) * 2]
        time.sleep(0.3)
        lose(made, nodes[0])
        found = [(content, answer.result()) for content, answer in asked]
        assert all(text in (None, whole[content]) for content, text in found)

    # The other replica continues.
    ends = time.monotonic() + 90
    while ask(address, PROMPTS[0], max_tokens=24) != whole[PROMPTS[0]]:
        assert time.monotonic() < ends, "no replica answers"
        time.sleep(1)

    # A replica that is to stop ends what it has begun. The router may not know yet that a machine is lost: a stream that has
    # no part was sent there.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for _ in range(20):
            running = threading.Event()
            text = pool.submit(ask, address, PROMPTS[1], True, running.set, max_tokens=150)
            while not running.wait(0.05) and not text.done():
                pass
            if running.is_set():
                break
        serve.delete("default")
        assert text.result(120), "the stream broke off"
    serve.shutdown()
