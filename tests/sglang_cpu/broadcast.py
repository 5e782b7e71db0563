"""A trainer that sends the weights of a checkpoint to a server once: `python broadcast.py PORT MODEL GROUP`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    import torch.distributed as dist
    from safetensors.torch import load_file
    from sglang.srt.utils import init_custom_process_group

    port, model, group_name = sys.argv[1:]
    group = init_custom_process_group(
        backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name=group_name
    )
    for _, tensor in sorted(load_file(Path(model, "model.safetensors")).items()):
        dist.broadcast(tensor, src=0, group=group)
