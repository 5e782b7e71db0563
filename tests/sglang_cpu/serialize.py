"""A trainer that shares the weights of a checkpoint with a server on the same machine.

`python serialize.py MODEL` prints what `/update_weights_from_tensor` wants, in base64, and keeps the weights until its
input ends.
"""

import base64
import sys
from pathlib import Path

if __name__ == "__main__":
    import torch
    from safetensors.torch import load_file
    from sglang.srt.utils import MultiprocessingSerializer

    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]  # the server is no child
    tensors = list(load_file(Path(sys.argv[1], "model.safetensors")).items())
    print(base64.b64encode(MultiprocessingSerializer.serialize(tensors)).decode(), flush=True)
    sys.stdin.read()
