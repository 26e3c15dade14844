"""A mkdocs hook: notebooks become pages with their committed outputs, in the site's own style and without scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> Files:
    """A page beside each notebook."""
    for file in [f for f in files if f.src_uri.endswith(".ipynb")]:
        notebook = json.loads(Path(file.abs_src_path).read_text(encoding="utf-8"))
        page = File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=as_markdown(notebook))
        files.append(page)
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to a notebook lead to its page."""
    return markdown.replace(".ipynb)", ".md)")


def as_markdown(notebook: dict[str, Any]) -> str:
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [shown for output in cell["outputs"] if (shown := _output(output))]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "error":
        raise SystemExit(f"the notebook was committed with an error: {output['ename']}")
    data = output.get("data", {})
    if "text/html" in data:
        return f'<div class="shown" markdown="0">{"".join(data["text/html"])}</div>'
    text = "".join(output.get("text") or data.get("text/plain", ""))
    return f"```{{ .text .shown }}\n{text.rstrip()}\n```" if text else ""
