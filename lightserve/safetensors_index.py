"""Which files of a model folder hold its weights: those its index names, or the one file there is; no others."""

from pathlib import Path

from lightserve.fields import Fields

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def read_index(folder: Path) -> dict[str, str] | None:
    """Read in which file of the folder each tensor lies; None without an index.

    Raises:
        ConfigError: It is no such list, or leads out of the folder.
    """
    path = folder / INDEX
    if not path.exists():
        return None
    index = Fields.from_json(path)
    weight_map = index.raw("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise index.refusal("weight_map", "must name the file of each tensor")
    for file_name in weight_map.values():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise index.refusal("weight_map", f"must name files of its own folder, not {file_name!r}")
    return weight_map


def weight_files(folder: Path) -> list[Path]:
    """Name the files, whether they exist or not.

    Raises:
        ConfigError: As ``read_index``.
    """
    index = read_index(folder)
    return sorted({folder / file_name for file_name in index.values()}) if index else [folder / SINGLE]
