"""Replicas on Ray Serve. SLUICE_RAY=1 runs these, where ray[serve] is installed: a cluster of one machine takes a while to start."""

import json
import os
import threading
import time
import urllib.error
import urllib.request

import pytest

import sluice

if os.environ.get("SLUICE_RAY") != "1":
    pytest.skip("SKIPPED: SLUICE_RAY=1 runs the tests of replicas", allow_module_level=True)
ray = pytest.importorskip("ray", reason="SKIPPED: there is no Ray")
serve = pytest.importorskip("ray.serve", reason="SKIPPED: there is no Ray Serve")

PORT = int(os.environ.get("SLUICE_RAY_PORT", "8123"))


@pytest.fixture(scope="module")
def handle():
    import sluice.ray

    folder = os.path.dirname(os.path.dirname(os.path.abspath(sluice.__file__)))
    environment = {"PYTHONPATH": folder, "SLUICE_DEMO": sluice.demo()}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    config = {"model": sluice.demo(), "name": "demo", "replicas": 2, "options": {"max_context": 2048, "parallel": 4}}
    serve.run(sluice.ray.build_app(config), name="sluice", route_prefix="/")
    yield serve.get_deployment_handle("SluiceServer", "sluice")
    serve.shutdown()
    ray.shutdown()


def ask(path, body=None, raw=False):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
    return 200, text if raw else json.loads(text)


def chat(content, **more):
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, **more}


def test_answers_are_those_of_one_engine(handle, model):
    expected = model.request("POST", "/v1/chat/completions", chat("Tell me a story."))["choices"][0]["message"]
    for _ in range(3):
        status, answer = ask("/v1/chat/completions", chat("Tell me a story."))
        assert (status, answer["choices"][0]["message"]) == (200, expected) and answer["model"] == "demo"
    status, text = ask("/v1/chat/completions", chat("Tell me a story.", stream=True), raw=True)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]) == expected["content"]
    assert ask("/v1/models")[1]["data"][0]["id"] == "demo"
    assert ask("/tokenize", {"prompt": "Once"})[0] == 200


def test_errors_are_the_servers(handle):
    status, answer = ask("/v1/chat/completions", {"messages": 1})
    assert status == 400 and "messages must be a list" in answer["error"]["message"]
    assert ask("/nowhere")[0] == 404


def test_what_begins_alike_goes_to_one_replica(handle):
    text = "Once upon a time there was a small dog who liked to run in the park. " * 6
    cached = []
    for number in range(6):
        _, answer = ask("/v1/chat/completions", chat(f"{text}", seed=number))
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] < 32 and min(cached[1:]) > 50, cached


def test_prefixes_are_spread(handle):
    from sluice.ray import Affinity, marks_of, prefix_of

    affinity, chosen = Affinity(), []
    system = {"role": "system", "content": "You tell stories. " * 20}
    for number in range(400):
        marks = marks_of(prefix_of({"messages": [system, {"role": "user", "content": f"Story {number}. " * 40}]}))
        chosen.append(affinity.order(marks, ["a", "b", "c", "d"])[0])
        affinity.remember(marks, chosen[-1])
    assert all(60 < chosen.count(name) < 140 for name in "abcd")


def test_a_document_keeps_its_replica_whatever_is_asked(handle):
    from sluice.ray import Affinity, marks_of, prefix_of

    affinity, document = Affinity(), "Once upon a time there was a small dog. " * 100
    first = marks_of(prefix_of(chat(document + "Who was there?")))
    affinity.remember(first, "b")
    for number in range(20):
        assert affinity.order(marks_of(prefix_of(chat(f"{document}Question {number}?"))), ["a", "b", "c"])[0] == "b"
    # It is gone: another takes its place.
    assert affinity.order(first, ["a", "c"])[0] in "ac"
    text = "There was a king who had a large garden with many trees in it. " * 12
    cached = [ask("/v1/chat/completions", chat(f"{text}Part {number}."))[1]["usage"]["prompt_tokens_details"]["cached_tokens"] for number in range(8)]
    # The demo is a hybrid: the second prompt shows where a copy of the recurrent states is worth keeping.
    assert min(cached[2:]) > 50, cached


def test_methods_for_ray_serve_llm(handle):
    stream = handle.options(stream=True)
    (whole,) = list(stream.chat.remote(chat("Hi")))
    assert whole["object"] == "chat.completion"
    parts = list(stream.completions.remote({"prompt": "Once", "max_tokens": 3, "stream": True}))
    assert parts[-1] == "data: [DONE]\n\n" and all(part.startswith("data: ") for part in parts)
    (tokens,) = list(stream.tokenize.remote({"prompt": "Once upon"}))
    (text,) = list(stream.detokenize.remote({"tokens": tokens["tokens"]}))
    assert text["prompt"].endswith("Once upon")
    (vectors,) = list(stream.embeddings.remote({"input": ["a"]}))
    assert len(vectors["data"]) == 1


def test_a_killed_replica_stops_nobody_for_long(handle):
    expected = ask("/v1/chat/completions", chat("Tell me a story."))[1]["choices"][0]["message"]["content"]
    killed, results = threading.Event(), []

    def work():
        # Ends with an answer or an error; never hangs, and is never wrong.
        while not killed.is_set() or len(results) < 12:
            status, answer = ask("/v1/chat/completions", chat("Tell me a story."))
            results.append(status)
            assert status != 200 or answer["choices"][0]["message"]["content"] == expected

    threads = [threading.Thread(target=work) for _ in range(2)]
    [thread.start() for thread in threads]
    time.sleep(0.5)
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if "SluiceServer" in actor["name"]]
    ray.kill(ray.get_actor(names[0], namespace="serve"))
    killed.set()
    [thread.join(120) for thread in threads]
    assert not any(thread.is_alive() for thread in threads)
    assert results.count(200) >= len(results) // 2, results
    assert ask("/v1/chat/completions", chat("Tell me a story."))[0] == 200
