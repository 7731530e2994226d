"""Two replicas on Ray, asked over HTTP: `ray_replicas.py HOW MODEL PORT`, with the package in PYTHONPATH and the interpreter's ray[serve]. HOW is `own` (sluice.ray), `llm` (Ray Serve LLM with its
router of prefixes), `direct` (the same, where HAProxy talks to replicas), or `empty` (the path of `own`, with a server that answers at once). Prints what the load found, as JSON."""

import json
import os
import sys
from pathlib import Path

import ray
from ray import serve

sys.path.insert(0, str(Path(__file__).resolve().parent))

import replica_load  # noqa: E402

HOW, MODEL, PORT = sys.argv[1], sys.argv[2], int(sys.argv[3])
OPTIONS = {"max_context": 2048, "parallel": 4}
DIRECT = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1", "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1"}


def application():
    if HOW in ("llm", "direct"):
        from ray.serve.config import RequestRouterConfig
        from ray.serve.llm import LLMConfig, build_openai_app

        router = RequestRouterConfig(request_router_class="ray.serve.llm.request_router.PrefixCacheAffinityRouter")
        config = LLMConfig(
            server_cls="sluice.ray_llm:LLMServer",
            model_loading_config={"model_id": "model", "model_source": MODEL},
            engine_kwargs=OPTIONS,
            deployment_config={"num_replicas": 2, "ray_actor_options": {"num_cpus": 1}, "request_router_config": router},
        )
        ingress = {} if HOW == "direct" else {"ingress_deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}}
        return build_openai_app({"llm_configs": [config], **ingress})
    import sluice.ray

    if HOW == "own":
        return sluice.ray.build_app({"model": MODEL, "name": "model", "replicas": 2, "options": OPTIONS})

    @serve.deployment(num_replicas=2)
    class Empty:
        async def whole(self, *_, **__):
            return 200, "", b'{"usage": {"prompt_tokens": 1}}'

        async def http(self, *_, **__):
            yield 200, ""

    return serve.deployment(sluice.ray.Ingress, ray_actor_options={"num_cpus": 0}).bind(Empty.bind())


if HOW == "direct" and os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":
    # Ray reads them when it is imported.
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | DIRECT)
passed = {name: value for name, value in os.environ.items() if name == "PYTHONPATH" or name.startswith("RAY_SERVE_")}
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": passed})
serve.start(http_options={"host": "127.0.0.1", "port": PORT})
serve.run(application(), name="replicas", route_prefix="/")
found = replica_load.measure("127.0.0.1", PORT)
serve.shutdown()
ray.shutdown()
print(json.dumps(found), flush=True)
