"""Test scores of single clients, from the clients.csv of a run folder."""

import csv
from pathlib import Path

from equipoise.errors import EquipoiseError

TRAINED, UNSEEN = "trained", "unseen"
ClientScores = dict[str, dict[str, float]]
"""By group (clients that trained, and unseen ones) and by client, each group only if there are such clients."""


def read_client_scores(folder: Path) -> ClientScores:
    """Return the test score of each client: of its personal model, else of the global one.

    Malicious clients, and clients without a score, are left out.

    Args:
        folder: the run folder.
    """
    path = folder / "clients.csv"
    if not path.is_file():
        raise EquipoiseError(f"{folder} has no clients.csv, so nothing is known of its single clients")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = [f"{kind}_test_metric" for kind in ("personal", "global")]
    column = next((name for name in columns if rows and name in rows[0]), "")
    found: ClientScores = {}
    for row in rows:
        if row.get(column) and row.get("malicious") != "true":
            group = UNSEEN if row.get("unseen") == "true" else TRAINED
            found.setdefault(group, {})[row["client"]] = float(row[column])
    return found
