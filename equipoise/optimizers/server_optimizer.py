"""Optimizers of the server: a step from the model it had to the mean of what clients sent, with a memory."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, WithJsonSchema
from torch import Tensor

from equipoise.errors import EquipoiseError
from equipoise.settings import Fraction, NonNegative, Positive, Settings, read

Memory = Mapping[str, Tensor]
"""What the optimizer remembers of one field: m and, if it is adaptive, v."""

_WHERE = "algorithm.server_optimizer"


class ServerOptimizer(Settings):
    """A step of the server after averaging: FedAvgM (sgd), FedAdagrad, FedAdam and FedYogi.

    x: what is averaged, a field of the server's state; delta: the mean minus x; m: its momentum; v: how large its
    coordinates are; eta: the server's rate (`lr`). The step takes the place of x + delta. There is no bias correction,
    and v takes delta itself, not its momentum, as in the published version of the paper.
    """

    paper: ClassVar[str] = "Reddi et al., Adaptive Federated Optimization, ICLR 2021, Alg. 2; Hsu et al., 2019"

    kind: Literal["sgd", "adagrad", "adam", "yogi"]
    "the rule: sgd with momentum (FedAvgM), or one that is adaptive"
    lr: Positive | None = None
    "rate of the server; by default 1 for sgd and 0.01 for the others"
    beta1: Fraction | None = None
    "decay of the momentum; by default 0.9, and 0 for adagrad"
    nesterov: bool = False
    "whether the momentum of sgd is Nesterov's"
    beta2: Fraction = 0.99
    "decay of v, for adam and yogi"
    tau: Positive = 1e-3
    "is added to the root of v, for the adaptive rules: how adaptive they are"
    v0: NonNegative | None = None
    "v before the first round, for the adaptive rules; by default the square of tau, as printed"

    def model_post_init(self, _: object) -> None:
        if unused := sorted(self.model_fields_set - set(self._used)):
            raise EquipoiseError(f"{_WHERE}.{unused[0]} has no effect with the kind {self.kind!r}; leave it out")
        if self.nesterov and not self.decay:
            raise EquipoiseError(f"{_WHERE}.nesterov = true needs {_WHERE}.beta1 > 0")

    @property
    def _used(self) -> tuple[str, ...]:
        adaptive = {"sgd": ("nesterov",), "adagrad": ("tau", "v0")}.get(self.kind, ("beta2", "tau", "v0"))
        return ("kind", "lr", "beta1", *adaptive)

    @property
    def rate(self) -> float:
        """Return the server's rate."""
        return self.lr if self.lr is not None else 1.0 if self.kind == "sgd" else 0.01

    @property
    def decay(self) -> float:
        """Return the decay of the momentum."""
        return self.beta1 if self.beta1 is not None else 0.0 if self.kind == "adagrad" else 0.9

    def table(self) -> dict[str, Any]:
        """Return the settings that this rule uses, as a TOML table with every default."""
        v0 = self.tau**2 if self.v0 is None else self.v0
        found = {**super().table(), "lr": self.rate, "beta1": self.decay, "v0": v0}
        return {key: value for key, value in found.items() if key in self._used}

    def step(self, x: Tensor, mean: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """Return x after the step, and what is to be remembered.

        Args:
            x: what the server had.
            mean: what it would have without the optimizer.
            memory: what was returned last time; nothing before the first step.
        """
        eta, beta1, beta2 = self.rate, self.decay, self.beta2
        if self.kind == "sgd" and eta == 1 and beta1 == 0:
            return mean, {}  # to the last bit, which x + (mean - x) is not
        delta = mean - x
        before = memory.get("m", 0.0)
        if self.kind == "sgd":
            m = beta1 * before + delta
            return x + eta * (delta + beta1 * m if self.nesterov else m), {"m": m}
        m = beta1 * before + (1 - beta1) * delta
        v = memory["v"] if "v" in memory else delta.new_full(delta.shape, self.tau**2 if self.v0 is None else self.v0)
        squared = delta.square()
        if self.kind == "adagrad":
            v = v + squared
        elif self.kind == "yogi":
            v = v - (1 - beta2) * squared * (v - squared).sign()
        else:
            v = beta2 * v + (1 - beta2) * squared
        return x + eta * m / (v.sqrt() + self.tau), {"m": m, "v": v}

    @staticmethod
    def of(value: Any) -> Any:
        """Return the optimizer that a value stands for: its kind, or a table of settings; None for "none"."""
        if isinstance(value, str):
            return None if value == "none" else read(ServerOptimizer, {"kind": value}, _WHERE)
        return read(ServerOptimizer, value, _WHERE) if isinstance(value, dict) else value


ServerOptimizerSetting = Annotated[
    ServerOptimizer | None,
    BeforeValidator(ServerOptimizer.of),
    WithJsonSchema({"anyOf": [{"enum": ["none", "sgd", "adagrad", "adam", "yogi"]}, {"type": "object"}]}),
]
