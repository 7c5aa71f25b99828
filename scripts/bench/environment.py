"""What figures were measured on, for the files that hold them."""

import datetime
import importlib.util
import subprocess
from importlib import metadata

import torch


def versions() -> dict[str, str]:
    """The day, the GPU, and the versions of what computes."""
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    flash = {
        name: metadata.version(name)
        for name in ("flash-attn", "flash-attn-3", "flash-attn-4", "flashinfer-python")
        if any(found.name == name for found in metadata.distributions())
    }
    if "flash-attn" in flash and importlib.util.find_spec("flash_attn_2_cuda") is None:
        flash["flash-attn"] += ", in name only"  # Megatron asks for its version, whoever attends
    return {
        "date": datetime.date.today().isoformat(),
        "GPU": torch.cuda.get_device_name(),
        "driver": driver,
        "CUDA": torch.version.cuda or "",
        "torch": torch.__version__,
        "Triton": triton.__version__,
        **flash,
    }
