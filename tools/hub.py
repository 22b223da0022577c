"""Write the kernels of hard samples as a folder for the Hub: `python tools/hub.py FOLDER`.

`kernels.get_local_kernel(FOLDER)` loads it, and `kernels.get_kernel` once it is uploaded. The folder has one
function, `sample`, above the files of the library that `gapped.kernels.sampling.launch` imports, whose
imports are relative there. It needs torch with Triton, and no installed `gapped`.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
ENTRY = "gapped.kernels.sampling.launch"
INIT = '''"""Hard samples of categorical logits by Triton kernels, with the gradient of an estimator."""

from .kernels.sampling import fused, launch

__all__ = ["sample"]


def sample(logits, estimator="gapmax", tau=1.0, generator=None):
    """One-hot samples of the last axis, which carry a gradient.

    The estimator is "gapmax", which has no temperature, "gst-auto", "gumbel-softmax", "reinmax" or
    "straight-through".
    """
    kernel = fused.Fused(estimator, tau)
    refusal = fused.refusal(logits, kernel)
    if refusal is not None:
        raise ValueError(f"sample: {refusal}")
    return launch.sample(logits, kernel, generator)
'''


def file_of(module: str) -> Path:
    path = SOURCE / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def closure(module: str) -> set[str]:
    """The modules of the library that one imports, directly or not, and the packages that they lie in."""
    modules, left = set(), [module]
    while left:
        one = left.pop()
        if one in modules or one == "gapped":
            continue
        modules.add(one)
        left.append(one.rpartition(".")[0])
        for node in ast.walk(ast.parse(file_of(one).read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "gapped":
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                left += [name if file_of(name).exists() else str(node.module) for name in inner]
    return modules


def write(folder: Path, backend: str = "cuda") -> Path:
    """Write the variant for any torch with this backend below `folder`, and return its place."""
    library, used = SOURCE / "gapped", map(file_of, closure(ENTRY))
    modules = {path.relative_to(library): path.read_text("utf-8") for path in used}
    code = hashlib.sha256("".join(modules[path] for path in sorted(modules)).encode()).hexdigest()[:7]
    files = {Path("__init__.py"): INIT}
    for path, text in modules.items():
        text = re.sub(r"^( *from )gapped\.?", rf"\1{'.' * len(path.parts)}", text, flags=re.M)
        # Several versions may be loaded beside each other, and beside the library.
        files[path] = re.sub(r'(?<=")gapped(?=::)|(?<=torch\.ops\.)gapped', f"gapped_{code}", text)
    place = folder / "build" / f"torch-{backend}"
    digests = {}
    for path, text in sorted(files.items()):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text, "utf-8")
        digests[path.as_posix()] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    metadata = {"name": "gapped-samples", "id": f"_gapped_samples_{code}", "version": 0, "license": "MIT"}
    metadata |= {"python-depends": [], "backend": {"type": backend}}
    metadata |= {"digest": {"algorithm": "sha256", "files": digests}}
    (place / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", "utf-8")
    return place


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
