"""A trained model in a file of its own, with what is needed to load it again."""

from pathlib import Path

from equipoise.config.experiment import Experiment
from equipoise.engine.model_files import write_model
from equipoise.errors import EquipoiseError
from equipoise.runs.result import Result


def export_model(result: Result, experiment: Experiment, client: str | None, path: Path) -> str:
    """Write client's personal model, or the global one where `client` is None; returns what was written."""
    # Where names are numbers themselves (households), a number can only be a name.
    by_number = client is not None and client.isdecimal() and not any(name.isdecimal() for name in result.clients)
    who: str | int | None = int(client) if client is not None and by_number else client
    if who is not None and result.looks_up:
        raise EquipoiseError(
            f"a personal model of {experiment.algorithm_name} is the global model together with the client's samples, "
            "which no file of parameters holds; --global exports the global model"
        )
    module = result.global_model() if who is None else result.personal(who)
    name = "global" if who is None else result.clients[who] if isinstance(who, int) else who
    federation = result.federation
    shape = federation.sample()[0].shape[1:]
    write_model(path, module, experiment, shape, federation.outputs, federation.title, name)
    return name
