"""Export of a trained model to a file, with everything that is needed to load it again."""

from pathlib import Path

from equipoise.config.experiment import Experiment
from equipoise.engine.model_files import write_model
from equipoise.errors import EquipoiseError
from equipoise.runs.result import Result


def export_model(result: Result, experiment: Experiment, client: str | None, path: Path) -> str:
    """Write one model of a run to a file.

    Args:
        result: the result of the run.
        experiment: the experiment of the run, which is stored with the model.
        client: number or name of the client whose personal model is written, or None for the global model.
        path: the file to write.

    Returns:
        The name of the client, or "global".
    """
    # Some clients have numbers as names (households); there a number is always read as a name.
    by_number = client is not None and client.isdecimal() and not any(name.isdecimal() for name in result.clients)
    who: str | int | None = int(client) if client is not None and by_number else client
    if who is not None and result.looks_up:
        raise EquipoiseError(
            f"a personal model of {experiment.algorithm_name} is the global model together with the client's samples, "
            "so it cannot be exported as parameters; export the global model with --global"
        )
    module = result.global_model() if who is None else result.personal(who)
    name = "global" if who is None else result.clients[who] if isinstance(who, int) else who
    federation = result.federation
    shape = federation.sample()[0].shape[1:]
    write_model(path, module, experiment, shape, federation.outputs, federation.title, name)
    return name
