"""Where the user's own data are: the setting `data.path`."""

from pathlib import Path

from equipoise.data.source import LoadRequest
from equipoise.errors import EquipoiseError
from equipoise.registry import find_path


def own_path(path: str, ask: LoadRequest, files: bool) -> Path:
    """Return the folder, or perhaps the file, that `data.path` names; by default the data folder.

    Args:
        path: the setting.
        ask: the request of the run, with the folders in which the path may begin.
        files: whether it may be a file.
    """
    places = [*ask.folders, Path.cwd(), ask.folder.absolute()]
    found = find_path(path, places) if path else ask.folder
    if found is not None and (found.is_dir() or (files and found.is_file())):
        return found
    if not path:
        raise EquipoiseError(f"the data folder {ask.folder} does not exist; name a folder with data.path or --data")
    looked = "" if Path(path).is_absolute() else f" in {' or '.join(dict.fromkeys(map(str, places)))}"
    raise EquipoiseError(f"data.path = {path!r} is not a {'file or ' if files else ''}folder{looked}")
