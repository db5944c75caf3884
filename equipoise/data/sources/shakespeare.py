"""Shakespeare by role, to predict the next character."""

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from equipoise.data import text_encoding
from equipoise.data.archives import first_existing
from equipoise.data.cache import Arrays, cached
from equipoise.data.partitions.base import by_owner
from equipoise.data.pool import Pool
from equipoise.data.source import DataProgress, DatasetStatus, LoadRequest, Source, missing_file, portion
from equipoise.data.sources.leaf import count_samples, each_user, leaf_files, read_json
from equipoise.data.time_split import parts_in_time
from equipoise.errors import EquipoiseError
from equipoise.settings import Count

_ROLES = ["shakespeare-roles.json.xz", "shakespeare-roles.json.gz", "shakespeare-roles.json"]
_WHOLE = 4_226_158  # samples of LEAF's full set, one per character that has 80 before it
_LEAF_WINDOW = 80
_LARGEST_ROLES = 64 << 20  # bytes; Shakespeare's complete text has about four million


class Shakespeare(Source):
    """The lines of Shakespeare's plays, one client per role; the target is the next character."""

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017; Caldas et al., LEAF, 2018"
    chronological: ClassVar[bool] = True
    how_to_get: ClassVar[str] = (
        "LEAF creates it: in its repository (github.com/TalwalkarLab/leaf) run data/shakespeare/preprocess.sh -s niid "
        "--sf 1.0 -k 0 -t sample, and copy its JSON files into the folder shakespeare of the data folder; a file "
        'shakespeare-roles.json with {"role": "all its words"} works too'
    )

    window: Count = 80
    "number of characters that the model reads"
    stride: Count = 80
    "number of characters from the start of one window to the next; 1 gives LEAF's overlapping windows"
    predict: Literal["every", "last"] = "every"
    "targets; every: the character after each position; last: only the one after the window, as in LEAF"

    def load(self, ask: LoadRequest) -> Pool:
        roles, paths = _files(ask.folder)
        if not paths:
            raise missing_file("shakespeare-roles.json.xz, or shakespeare/all_data.json,", [ask.folder], type(self))
        arrays = cached("shakespeare", paths, lambda: (_decode_roles if roles else _decode_leaf)(paths, ask.progress))
        names, codes, role = text_encoding.names_from_bytes(arrays["names"]), arrays["codes"], arrays["role"]
        ends = np.cumsum(arrays["lengths"])
        rows: list[np.ndarray] = []  # where each window begins in `codes`
        owner: list[np.ndarray] = []
        parts: list[np.ndarray] = []
        short = 0
        for number, pieces in enumerate(by_owner(role, len(names))):
            begins, lengths = (ends - arrays["lengths"])[pieces], arrays["lengths"][pieces]
            # No window reaches from one piece of text into the next. Where LEAF's sampling split a text into several
            # pieces, a piece may begin with text of the one before: these characters are not used as targets.
            known = 0 if len(pieces) == 1 else max(0, _LEAF_WINDOW - (1 if self.predict == "every" else self.window))
            inside = [np.arange(known, max(n - self.window, known), self.stride) for n in lengths]
            starts = np.concatenate([b + i for b, i in zip(begins, inside, strict=True)]).astype(np.int64)
            # First target of a window: the character after its first, or only the one after its last.
            asked = starts + (1 if self.predict == "every" else self.window)
            part = parts_in_time(asked, starts + self.window, ask.split)
            if not (part == 0).any():
                short += 1
                continue
            rows.append(starts[part >= 0])
            owner.append(np.full(len(rows[-1]), number, np.int32))
            parts.append(part[part >= 0])
        if not rows:
            raise EquipoiseError(
                f"no role is long enough: a training sample needs {self.window + 1} characters in a row"
            )
        windows = codes[np.concatenate(rows)[:, None] + np.arange(self.window + 1)]
        y = windows[:, 1:] if self.predict == "every" else windows[:, -1]
        count = int(np.maximum(arrays["lengths"] - _LEAF_WINDOW, 0).sum())
        return Pool(
            x=torch.from_numpy(np.ascontiguousarray(windows[:, :-1])),
            y=torch.from_numpy(y.astype(np.int64)),
            classes=text_encoding.SYMBOLS,
            owner=np.concatenate(owner),
            names=tuple(names),
            part=np.concatenate(parts),
            portion="own edition" if roles else portion(count, _WHOLE),
            notes=(f"{short} roles are left out: their text is too short for a training window",) if short else (),
        )

    def look(self, folder: Path) -> DatasetStatus | None:
        roles, paths = _files(folder)
        if not paths:
            return None
        if roles:
            return DatasetStatus(paths[0], None, None, "roles")
        return DatasetStatus(folder / "shakespeare", count_samples(paths), _WHOLE)


def _files(folder: Path) -> tuple[bool, list[Path]]:
    """Return whether the files hold roles with their whole text, and the files."""
    roles = first_existing([folder, folder / "shakespeare"], _ROLES)
    return (True, [roles]) if roles else (False, leaf_files(folder / "shakespeare"))


def _checked_roles(path: Path) -> dict[str, str]:
    roles = read_json(path, _LARGEST_ROLES)
    if not isinstance(roles, dict) or not roles or not all(isinstance(words, str) for words in roles.values()):
        raise EquipoiseError(f'{path} must be a table of texts, {{"role": "all its words", ...}}')
    for role in roles:
        text_encoding.check_name(path, role)
    return roles


def _arrays(texts: dict[str, list[str]]) -> Arrays:
    """Return the roles' pieces of text as arrays, one piece after the other."""
    pieces = [text_encoding.encode(piece) for pieces in texts.values() for piece in pieces]
    return {
        "codes": np.concatenate(pieces),
        "lengths": np.array([len(piece) for piece in pieces], np.int64),
        "role": np.repeat(np.arange(len(texts)), [len(pieces) for pieces in texts.values()]),
        "names": text_encoding.names_to_bytes(texts),
    }


def _decode_roles(paths: list[Path], progress: DataProgress) -> Arrays:
    return _arrays({name: [words] for name, words in _checked_roles(paths[0]).items()})


def _decode_leaf(paths: list[Path], progress: DataProgress) -> Arrays:
    texts: dict[str, list[list[str]]] = {}
    ends: dict[str, str] = {}
    for path, user, x, y in each_user(paths, progress):
        for k, (before, after) in enumerate(zip(x, y, strict=True)):
            _check_window(path, user, k, before, after)
        if x:
            ends[user] = _join(texts.setdefault(user, []), ends.get(user, ""), x, y)
    if not texts:
        raise EquipoiseError(f"{paths[0].parent} contains no samples")
    return _arrays({user: ["".join(piece) for piece in pieces] for user, pieces in texts.items()})


def _check_window(path: Path, user: str, k: int, before: Any, after: Any) -> None:
    if not isinstance(before, str) or len(before) != _LEAF_WINDOW or not isinstance(after, str) or len(after) != 1:
        raise EquipoiseError(
            f"{path}: sample {k} of user {user!r} is not a text of {_LEAF_WINDOW} characters and the next one"
        )


def _join(pieces: list[list[str]], end: str, x: list[str], y: list[str]) -> str:
    """Join LEAF's windows to the original text: a window that continues the one before adds only its target."""
    for before, after in zip(x, y, strict=True):
        if before == end:
            pieces[-1].append(after)
        else:
            pieces.append([before, after])
        end = before[1:] + after
    return end
