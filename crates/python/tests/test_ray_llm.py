"""A server class of Ray Serve LLM. SLUICE_RAY=1 runs these, where ray[llm] with vLLM or SGLang is installed, whose classes of requests Ray takes. SLUICE_RAY_DIRECT=1 (with Ray's
RAY_SERVE_ENABLE_HA_PROXY=1 RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1 RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY=1) has HAProxy talk to replicas."""

import json
import os
import urllib.error
import urllib.request

import pytest

import sluice

if os.environ.get("SLUICE_RAY") != "1":
    pytest.skip("SKIPPED: SLUICE_RAY=1 runs the tests of replicas", allow_module_level=True)
ray = pytest.importorskip("ray", reason="SKIPPED: there is no Ray")
serve = pytest.importorskip("ray.serve", reason="SKIPPED: there is no Ray Serve")
llm = pytest.importorskip("ray.serve.llm", reason="SKIPPED: there is no Ray Serve LLM, or neither vLLM nor SGLang", exc_type=ImportError)

PORT = int(os.environ.get("SLUICE_RAY_PORT", "8123")) + 1
DIRECT = os.environ.get("SLUICE_RAY_DIRECT") == "1"


@pytest.fixture(scope="module", autouse=True)
def application():
    folder = os.path.dirname(os.path.dirname(os.path.abspath(sluice.__file__)))
    path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": path, "SLUICE_DEMO": sluice.demo()} | {k: v for k, v in os.environ.items() if k.startswith("RAY_SERVE_")}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": environment})
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    # Without direct streaming Ray's router of prefixes knows no request but those with messages or a prompt; others wait for ever.
    router = serve.config.RequestRouterConfig(request_router_class="ray.serve.llm.request_router.PrefixCacheAffinityRouter")
    routed = {"request_router_config": router} if DIRECT else {}
    config = llm.LLMConfig(
        server_cls="sluice.ray_llm:LLMServer",
        model_loading_config={"model_id": "demo", "model_source": sluice.demo()},
        engine_kwargs={"max_context": 2048, "parallel": 4},
        deployment_config={"num_replicas": 2, "ray_actor_options": {"num_cpus": 1}, **routed},
    )
    ingress = {} if DIRECT else {"ingress_deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}}
    serve.run(llm.build_openai_app({"llm_configs": [config], **ingress}), name="llm", route_prefix="/")
    yield
    serve.shutdown()
    ray.shutdown()


def ask(path, body=None, raw=False):
    data = None if body is None else json.dumps({"model": "demo", **body}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
    return 200, text if raw else json.loads(text)


def chat(content, **more):
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0, **more}


def test_answers_are_those_of_one_engine(model):
    expected = model.request("POST", "/v1/chat/completions", chat("Tell me a story."))["choices"][0]["message"]["content"]
    status, answer = ask("/v1/chat/completions", chat("Tell me a story."))
    assert (status, answer["choices"][0]["message"]["content"], answer["model"]) == (200, expected, "demo")
    status, text = ask("/v1/chat/completions", chat("Tell me a story.", stream=True), raw=True)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"]) == expected
    assert text.rstrip().endswith("data: [DONE]")
    expected = model.request("POST", "/v1/completions", {"prompt": "Once", "max_tokens": 4, "temperature": 0})["choices"][0]["text"]
    assert ask("/v1/completions", {"prompt": "Once", "max_tokens": 4, "temperature": 0})[1]["choices"][0]["text"] == expected


def test_the_other_endpoints():
    assert ask("/v1/models")[1]["data"][0]["id"] == "demo"
    status, answer = ask("/v1/embeddings", {"input": ["a", "b"]})
    assert status == 200 and len(answer["data"]) == 2
    status, answer = ask("/tokenize", {"prompt": "Once upon"})
    assert status == 200 and answer["count"] == 2
    status, answer = ask("/detokenize", {"tokens": answer["tokens"]})
    assert status == 200 and (answer.get("text") or answer.get("prompt")) == "Once upon"


def test_errors_are_the_servers():
    status, answer = ask("/v1/chat/completions", chat("Hi", temperature=-3))
    assert status == 400 and "temperature must be 0 or more" in answer["error"]["message"]
    status, answer = ask("/v1/chat/completions", chat("Hi", temperature=-3, stream=True))
    assert status == 400 and "temperature must be 0 or more" in answer["error"]["message"]


@pytest.mark.skipif(not DIRECT, reason="SKIPPED: SLUICE_RAY_DIRECT is not set")
def test_rays_router_keeps_prefixes():
    text = "Once upon a time there was a small dog who liked to run in the park. " * 6
    cached = [ask("/v1/chat/completions", chat(f"{text}Part {number}."))[1]["usage"]["prompt_tokens_details"]["cached_tokens"] for number in range(8)]
    # The demo is a hybrid: the second prompt shows where a copy of the recurrent states is worth keeping.
    assert min(cached[2:]) > 50, cached
