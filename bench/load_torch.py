"""safetensors and torch: `load_torch.py FOLDER`, with the Python of the peers' environment. Brings every tensor into memory and prints how many bytes they are;
nothing is computed."""

import sys
from pathlib import Path

from safetensors.torch import load_file

weights = {}
for file in sorted(Path(sys.argv[1]).glob("*.safetensors")):
    # A mapped tensor is in memory only once it is copied.
    weights |= {name: tensor.clone() for name, tensor in load_file(file).items()}
print(sum(t.nbytes for t in weights.values()), flush=True)
