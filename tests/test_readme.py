"""What the README says of the flags is what the code says."""

import dataclasses
import re
from pathlib import Path

from lightserve.config import ServerConfig

_README = Path(__file__).parents[1] / "README.md"


def _flag_row(field: "dataclasses.Field[object]") -> str:
    default = "" if field.default is None else f"`{field.default}`"
    return f"| `--{field.name}` | {default} | {field.metadata['help']} |"


def test_the_table_of_flags_is_that_of_the_settings() -> None:
    table = re.search(r"<!-- flags: .*?-->\n(.*?)\n<!-- end of flags -->", _README.read_text(), re.DOTALL)
    assert table is not None
    rows = ["| flag | default | what |", "|---|---|---|", *map(_flag_row, dataclasses.fields(ServerConfig))]
    assert table[1] == "\n".join(rows)


def test_links_lead_to_files_that_exist() -> None:
    root = _README.parent
    for page in (_README, *root.glob("docs/*.md")):
        for target in re.findall(r"\]\(([^):#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
