"""Export of a trained model to a file, with everything that is needed to load it again."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.algorithms.base import Algorithm
from equipoise.data.series_scale import client_scale
from equipoise.engine.described_modules import described_own_modules
from equipoise.engine.model_files import write_model, write_tensors_of_model
from equipoise.engine.unscaled import described_series
from equipoise.errors import EquipoiseError
from equipoise.registry import is_own_code
from equipoise.runs.launch import reopen
from equipoise.runs.load import known_algorithm
from equipoise.runs.predictions import client_number
from equipoise.runs.saved_models import SavedModels
from equipoise.storage.run_folder import RunFolder, made_in_python, read_toml


def export_model(folder: Path, client: str | None, path: Path, data: Path | None = None) -> tuple[str, bool]:
    """Write one model of a run to a file.

    Args:
        folder: the folder of the run.
        client: number or name of the client whose personal model is written, or None for the global model.
        path: the file to write.
        data: the folder of data sets, or None for the one that the run used.

    Returns:
        The name of the client, or "global"; and whether loading the file takes the user's own module.
    """
    opened = RunFolder.open(folder)
    if made_in_python(read_toml(opened.config)):
        if not opened.models.exists():
            raise EquipoiseError(
                f"{folder} was made from Python and has no {opened.models.name}: the run is not finished, or is of an "
                "older version; continue it with train(..., out=..., resume=True), which writes the models at the end"
            )
        algorithm = known_algorithm(read_toml(opened.config)["algorithm"])
        return _export_saved(SavedModels(opened.models), algorithm, client, path), True
    result, experiment = reopen(folder, data)
    who = None if client is None else client_by_text(result.clients, client)
    if who is not None and result.looks_up:
        raise EquipoiseError(_looks_up(experiment.algorithm_name))
    module = result.global_model() if who is None else result.personal(who)
    name = "global" if who is None else result.clients[who]
    federation = result.federation
    shape = federation.sample()[0].shape[1:]
    scale = None if who is None else client_scale(federation, who)
    series = described_series(scale, experiment.schedule.pinball)
    write_model(path, module, experiment, shape, result.outputs, federation.title, name, series)
    return name, is_own_code(experiment.model_name)


def _export_saved(models: SavedModels, algorithm: Algorithm | None, client: str | None, path: Path) -> str:
    """Write a model of a run that was made from Python, for which its module is not needed."""
    facts, method = models.facts, models.facts["method"]
    if client is None:
        if models.shared is None:
            raise EquipoiseError(f"{method} has no global model; export a client's personal model with --client")
        if facts["buffers"] and models.averaged is None:
            raise EquipoiseError("the model's buffers stay with the clients, so there is no global model without one")
        name, tensors, scale = "global", models.tensors(models.shared, models.averaged), None
    else:
        who = client_by_text(models.names, client)
        model = models.personal(who)
        if model is None:
            raise EquipoiseError(f"{method} has no personal models; export the global one with --global")
        if model.looks_up:
            raise EquipoiseError(_looks_up(method))
        name, tensors = models.names[who], models.tensors(model.vector, model.buffers)
        scale = (facts.get("scales") or {who: None})[who]
    described = {
        "shape": facts["inputs"][0],
        "outputs": facts["outputs"],
        "dtype": facts["dtype"],
        "trained": {"algorithm": method, "data": facts["title"], "of": name},
        **described_own_modules(algorithm, facts["head"]),
        **({"series": scale} if scale else {}),
        **({"quantiles": facts["quantiles"]} if facts.get("quantiles") else {}),
    }
    write_tensors_of_model(path, tensors, described)
    return name


def _looks_up(method: str) -> str:
    return (
        f"a personal model of {method} is the global model together with the client's samples, so it cannot be "
        "exported as parameters; export the global model with --global"
    )


def client_by_text(names: Sequence[str], client: str) -> int:
    """Return the number of a client that is given on the command line, by its number or its name."""
    # Some clients have numbers as names (households); there a number is always read as a name.
    by_number = client.isdecimal() and not any(name.isdecimal() for name in names)
    return client_number(names, int(client) if by_number else client)
