"""Scripts find the packages beside them although PYTHONSAFEPATH keeps their folder off ``sys.path``."""

import json
import subprocess
import sys
from pathlib import Path

from gpu_checks import kernel_tour

SCRIPTS = Path(__file__).parents[2] / "scripts"
TOUR = Path(kernel_tour.__file__)

# One process for all, as each would import torch; none finds what another has imported or put on the path.
ASK_ALL_FOR_HELP = """
import contextlib, io, json, runpy, sys

scripts, *paths = sys.argv[1:]
safe_path, helps = list(sys.path), {}
for path in paths:
    sys.path[:], sys.argv[:] = safe_path, [path, "--help"]
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(scripts):
            del sys.modules[name]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            helps[path] = [end.code, out.getvalue()]
json.dump(helps, sys.stdout)
"""


def test_every_script_says_what_it_does_without_its_folder_on_the_path() -> None:
    paths = [str(path) for path in (*SCRIPTS.glob("*.py"), TOUR)]
    command = [sys.executable, "-P", "-c", ASK_ALL_FOR_HELP, str(SCRIPTS), *paths]
    helps = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert helps.keys() == set(paths)
    for path, (status, text) in helps.items():
        assert (status, text.startswith(f"usage: {Path(path).name}")) == (0, True)
