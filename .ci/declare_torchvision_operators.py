"""Let torchvision import beside a torch build that it was not compiled for.

Its import registers shapes for two compiled operators that are then missing. Declaring them first is enough for the
transforms that OpenCLIP and timm use. This is a step of the test environment, no part of the package.
"""

import importlib.util
from pathlib import Path

MARK = "# declared before the import"
LINES = f"""{MARK}
import torch
_declared = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _declared.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

found = importlib.util.find_spec("torchvision")
if found is None or found.origin is None:
    raise SystemExit("torchvision is not installed")
module = Path(found.origin)
text = module.read_text()
if MARK not in text:
    module.write_text(LINES + text)
