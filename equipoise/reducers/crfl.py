"""CRFL: the global model is clipped and noised after any rule has combined the messages."""

from typing import Any, ClassVar

from pydantic import field_validator

from equipoise.errors import EquipoiseError
from equipoise.reducers.base import ContextReducer, Reducer
from equipoise.reducers.context import ReductionContext
from equipoise.reducers.mean import WeightedMean
from equipoise.registry import choose, name_of
from equipoise.settings import NonNegative, Positive, shown
from equipoise.state import State, Uploads
from equipoise.torch_device import widened


class CRFL(ContextReducer):
    """Another rule, whose result, the global model, is then clipped to a norm that grows, and noised (CRFL).

    rho: the largest norm, rho_start + rho_growth t in round t, up to rho_most; sigma: the noise, none in the last
    round. The paper's certificate, a vote of many noised models, is not computed: this is CRFL without certificate.
    """

    paper: ClassVar[str] = "Xie et al., CRFL: Certifiably Robust FL against Backdoor Attacks, ICML 2021, Alg. 1"
    needs_origin: ClassVar[bool] = True
    needs_model: ClassVar[bool] = True

    rule: Reducer = WeightedMean()
    'the rule that combines the messages, such as {name = "median"}; by default weighted-mean'
    rho_start: NonNegative = 2.0
    "largest norm before the first round"
    rho_growth: NonNegative = 0.1
    "what each round adds to it"
    rho_most: Positive = 15.0
    "largest norm at most"
    sigma: NonNegative = 0.01
    "standard deviation of the noise on every parameter"

    @field_validator("rule", mode="before")
    @classmethod
    def _read_rule(cls, value: Any) -> Any:
        from equipoise.reducers import REDUCERS

        if isinstance(value, dict):
            return choose(REDUCERS, value, "reducer.rule")[1]
        if not isinstance(value, Reducer):
            raise EquipoiseError(
                f'reducer.rule = {shown(value)} is not allowed; it must be a table such as {{name = "median"}}'
            )
        return value

    def model_post_init(self, _: Any) -> None:
        if self.before:
            raise EquipoiseError("reducer.before is not possible with CRFL itself; set reducer.rule.before instead")

    def table(self) -> dict[str, Any]:
        from equipoise.reducers import REDUCERS

        return {**super().table(), "rule": {"name": name_of(REDUCERS, self.rule), **self.rule.table()}}

    @property
    def remembers(self) -> bool:
        return self.rule.remembers

    @property
    def trusts(self) -> tuple[str, ...]:
        return self.rule.trusts

    def memory(self, like: State, clients: int) -> State:
        return self.rule.memory(like, clients)

    def reduce(self, uploads: Uploads, context: ReductionContext) -> tuple[State, State]:
        message, memory = self.rule.apply(uploads, context)
        rho = min(self.rho_most, self.rho_start + self.rho_growth * context.round)
        model = {k: widened(message[k]) for k in context.models}
        norm = sum(float(t.square().sum()) for t in model.values()) ** 0.5
        if norm > rho:
            model = {k: t * (rho / norm) for k, t in model.items()}
        if self.sigma and context.round < context.rounds:
            model = {k: t + self.sigma * context.normal(k, t) for k, t in model.items()}
        return State(message, **{k: t.to(message[k].dtype) for k, t in model.items()}), memory
