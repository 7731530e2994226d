"""The model ``sluice`` of EleutherAI's evaluation harness: ``python -m sluice.lm_eval --model sluice --model_args model=PATH --tasks ..`` runs the harness with it.

In a program, import this module and name ``model="sluice"``, or pass ``SluiceLM(model=..)``. The harness has a model for vLLM too, but that one needs vLLM's own insides.
"""

from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ._generate import collect_all
from ._model import Model

#: Arguments that the harness passes to every model.
_OF_THE_HARNESS = ("batch_size", "max_batch_size", "device", "trust_remote_code")


@register_model("sluice")
class SluiceLM(TemplateLM):
    """A model for the harness. ``model_args`` are ``model``, and options as in :func:`sluice.load`: ``activations=f32`` computes without rounding activations."""

    backend = "causal"

    def __init__(self, model: "str | Model", max_gen_toks: int = 256, **options: Any):
        super().__init__()
        # The harness names a GPU whether there is one or not.
        device = options.get("device") or "cpu"
        options = {name: value for name, value in options.items() if name not in _OF_THE_HARNESS}
        options["device"] = "cpu" if str(device) == "cpu" else "auto"
        options.setdefault("parallel", 16)
        self.model = model if isinstance(model, Model) else Model(model, **options)
        self.max_gen_toks = max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.model.tokenizer.eos_token_id or 0

    @property
    def prefix_token_id(self) -> int:
        """The token in front of a text without a beginning."""
        begin = self.model.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def max_length(self) -> int:
        """The longest context in tokens."""
        return self.model.context

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's own cache."""
        return self.model.name

    def tok_encode(self, string: str, add_special_tokens: "bool | None" = None, **_: Any) -> "list[int]":
        """The tokens of a text."""
        if add_special_tokens is None:
            begin = self.model.tokenizer.bos_token
            add_special_tokens = begin is not None and not string.startswith(begin)
        return self.model.tokenizer.encode(string, add_special_tokens)

    def apply_chat_template(self, chat_history: "list[dict[str, str]]", add_generation_prompt: bool = True) -> str:
        """A conversation as text."""
        return str(self.model.tokenizer.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt, tokenize=False))

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, **_: Any) -> "list[tuple[float, bool]]":
        found = []
        for _key, context, continuation in requests:
            # What is too long loses its beginning.
            tokens = [*context, *continuation][-self.max_length :]
            start = len(tokens) - len(continuation)
            scored = self.model.engine.logprobs(tokens, max(start, 1), 1)
            greedy = all(top[0][0] == token for token, (_, top) in zip(tokens[max(start, 1) :], scored))
            found.append((sum(chosen for chosen, _ in scored), greedy))
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> "list[float]":
        """The log-likelihood of whole texts, in windows of the context."""
        found = []
        for (text,) in [request.args for request in requests]:
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(value for value, _ in self._loglikelihood_tokens(parts)))
        return found

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> "list[str]":
        """Answers, computed together."""
        asked = []
        for context, arguments in [request.args for request in requests]:
            arguments = dict(arguments)
            until = arguments.get("until") or []
            limit = int(arguments.get("max_gen_toks", self.max_gen_toks))
            temperature = float(arguments.get("temperature", 0.0)) if arguments.get("do_sample", False) else 0.0
            tokens = self.tok_encode(context)[-(self.max_length - limit) :]
            params = {"temperature": temperature, "max_tokens": limit, "stop": [until] if isinstance(until, str) else list(until)}
            if temperature:
                params["top_p"] = float(arguments.get("top_p", 1.0))
            asked.append((tokens, params))
        return [result[0][0] for result in collect_all(self.model, asked)]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
