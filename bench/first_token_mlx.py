"""mlx-lm on the CPU: `first_token_mlx.py FOLDER TOKENS` (ids, comma-separated), with the Python of the peers' environment. Loads the weights as mlx-lm does and
prints the token that follows."""

import sys
from pathlib import Path

import mlx.core as mx
from mlx_lm.utils import load_model

mx.set_default_device(mx.cpu)
model, _ = load_model(Path(sys.argv[1]))
ids = mx.array([[int(t) for t in sys.argv[2].split(",")]])
print(mx.argmax(model(ids)[:, -1], axis=-1).item(), flush=True)
