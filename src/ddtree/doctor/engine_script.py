"""What the engine's own interpreter is asked: versions, pins that are not kept, and what torch was built for."""

ENGINE_SCRIPT = r"""
import json, platform, sys
from importlib.metadata import PackageNotFoundError, distribution, version

NAMES = ("torch", "triton", "sglang", "vllm", "ddtree", "sglang-kernel", "sgl-kernel", "flashinfer-python",
         "transformers", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
told = {"python": platform.python_version(), "executable": sys.executable, "packages": {}, "unmet": [], "torch": None}
for name in NAMES:
    try:
        told["packages"][name] = version(name)
    except PackageNotFoundError:
        pass
try:
    from packaging.requirements import Requirement
except ImportError:
    told["unmet"] = None
else:
    for name in ("torch", "sglang", "vllm", "ddtree"):
        if name not in told["packages"]:
            continue
        for line in distribution(name).requires or ():
            wanted = Requirement(line)
            found = told["packages"].get(wanted.name.lower())
            if found is None or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
                continue
            if not wanted.specifier.contains(found, prereleases=True):
                told["unmet"].append([name, str(wanted).split(";")[0].strip(), found])
if "torch" in told["packages"]:
    try:
        import torch
        flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
        nccl = None
        if torch.version.cuda and torch.distributed.is_available() and torch.distributed.is_nccl_available():
            nccl = ".".join(map(str, torch.cuda.nccl.version()))
        told["torch"] = {"cuda": torch.version.cuda, "archs": flags.split() if flags else [], "nccl": nccl,
                         "sees_gpus": torch.cuda.device_count()}
    except Exception as error:
        told["torch_error"] = "%s: %s" % (type(error).__name__, str(error)[:300])
print(json.dumps(told))
"""
