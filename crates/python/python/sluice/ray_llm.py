"""Replicas behind Ray Serve LLM: its ingress, its configuration and its routers, with this engine in place of vLLM or SGLang.

``LLMConfig(server_cls=LLMServer, model_loading_config={"model_id": "qwen", "model_source": PATH}, engine_kwargs={"max_context": 32768})``, or in YAML ``server_cls: sluice.ray_llm:LLMServer``.
``engine_kwargs`` are the options of :func:`sluice.load`. Cores and GPUs of a replica are its ``ray_actor_options`` in ``deployment_config``.

Ray Serve LLM takes the classes of requests and answers from vLLM or SGLang, so one of them must be installed there; nothing of it runs. Without it, :func:`sluice.ray.build_app` is as good.
"""

import copy
import json
from typing import Any, AsyncIterator

from ray.llm._internal.serve.core.configs import openai_api_models as api

from .errors import ModelError, RequestError
from .ray import SluiceServer, _respond

_ANSWERS = {
    "/v1/chat/completions": api.ChatCompletionResponse,
    "/v1/completions": api.CompletionResponse,
    "/v1/embeddings": api.EmbeddingResponse,
}


class LLMServer(SluiceServer):
    """A replica, made from an ``LLMConfig`` of Ray Serve LLM."""

    def __init__(self, llm_config: Any):
        self._llm_config = llm_config
        loading = llm_config.model_loading_config
        source = loading.model_source or loading.model_id
        if not isinstance(source, str):
            raise ModelError("model_source must be a name or a path: buckets are not copied here")
        actor = llm_config.deployment_config.get("ray_actor_options") or {}
        config = {"model": source, "name": llm_config.model_id, "options": dict(llm_config.engine_kwargs)}
        super().__init__({**config, "cpus": actor.get("num_cpus", 1), "gpus": actor.get("num_gpus", 0)})

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> "dict[str, Any]":
        """Ray Serve's options for a deployment of this class: those of the configuration, and the environment of its processes."""
        options = copy.deepcopy(llm_config.deployment_config)
        if llm_config.runtime_env:
            options.setdefault("ray_actor_options", {}).setdefault("runtime_env", {}).update(llm_config.runtime_env)
        return options

    async def llm_config(self) -> Any:
        """The configuration."""
        return self._llm_config

    async def __serve_build_asgi_app__(self) -> Any:
        """All paths of the server, for ``RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING=1``: HAProxy then talks to the replica itself."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        async def any_path(request: Any) -> Any:
            return await _respond(request, self.whole, self.http)

        return Starlette(routes=[Route("/{path:path}", any_path, methods=["GET", "POST", "DELETE"])])

    async def _answers(self, path: str, request: Any) -> "AsyncIterator[Any]":
        begun = False
        try:
            async for answer in super()._answers(path, request):
                begun = True
                yield answer if isinstance(answer, str) else _typed(path, answer)
        except RequestError as error:
            failed = {"error": {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": error.status}}
            yield f"data: {json.dumps(failed)}\n\n" if begun else api.ErrorResponse.model_validate(failed)


def _typed(path: str, answer: "dict[str, Any]") -> Any:
    """An answer as the class that Ray's ingress looks for."""
    if path == "/tokenize":
        # SGLang's names; vLLM's are those of the answer.
        return api.TokenizeResponse.model_validate({**answer, "max_model_len": answer.get("max_model_len", 0)})
    if path == "/detokenize":
        return api.DetokenizeResponse.model_validate({**answer, "text": answer["prompt"]})
    return _ANSWERS[path].model_validate(answer)
