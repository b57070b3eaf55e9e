"""The experts that a model's routers choose: recorded where tokens are sampled, replayed where they are scored (R3).

Ma et al. 2025, arXiv:2510.11370. T tokens, L layers with a mixture of E experts, K experts chosen for each token.

A router is a module next to `experts` that returns the experts that it chose by `torch.topk`. While it runs, this
call is intercepted: to see its choice, or to replace it. The weights of the experts are in both cases the router's own,
from its scores of these experts, so a gradient reaches the router.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from schemas.errors import ModelError, ScoringError

ROUTED_EXPERTS = "routed_experts"  # the model's argument with the experts to replay: [T, L * K] integer
_ROUTERS = ("gate", "router")  # what modules with `experts` call their router
_MAX_BYTE = 256  # experts whose numbers fit uint8


class RouterReplay:
    """Records the experts of a model's forward, or has it use those of its argument `routed_experts`.

    Attributes:
        num_layers: L, in the order of the layers.
        num_chosen: K.
        num_experts: E.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Let a model's routers record and replay; the model may be on the meta device, but not sharded yet.

        Raises:
            ModelError: Experts can't be replayed in models of this family, or there are none.
        """
        self._family = str(model.config.model_type)
        layers = getattr(model.get_decoder(), "layers", ())  # type: ignore[no-untyped-call]
        found = [(layer, router) for layer in layers for router in self._find(layer)]
        sizes = {(int(router.num_experts), int(router.top_k)) for _, router in found}
        if len(sizes) != 1:
            raise self._refusal(
                "has no experts in the layers of its decoder"
                if not sizes
                else f"chooses (of, experts) {sorted(sizes)} by layer"
            )
        [(self.num_experts, self.num_chosen)] = sizes
        self.num_layers = len(found)
        hidden_size = model.config.get_text_config().hidden_size
        self._routers = [self._wrap(router, hidden_size) for _, router in found]
        of_layer = {id(layer): [at for at, (own, _) in enumerate(found) if own is layer] for layer in layers}
        for layer in layers:
            layer.register_forward_pre_hook(self._giving(of_layer[id(layer)]), with_kwargs=True)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The narrowest dtype that numbers the experts."""
        return np.dtype(np.uint8 if self.num_experts <= _MAX_BYTE else np.uint16)

    @property
    def width(self) -> int:
        """The experts of a token in all layers: L * K."""
        return self.num_layers * self.num_chosen

    @property
    def column_dtype(self) -> str:
        """The dtype of a column of experts."""
        return f"{self.dtype}[{self.width}]"

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Record one forward; afterwards the list has its experts, [T, L * K] int64, in the order of its tokens."""
        chosen: list[Tensor] = []
        for router in self._routers:
            router.record = []
        try:
            yield chosen
            chosen.append(torch.cat([each for router in self._routers for each in router.record or ()], dim=1))
            assert chosen[0].shape[1] == self.width
        finally:
            for router in self._routers:
                router.record = None

    def check(self, forward: Callable[[Tensor | None], object]) -> None:
        """Check that routers use the experts that they are given, even those that they would not choose.

        Args:
            forward: Runs the model on some tokens, with the experts of each, or None: with those that are chosen.

        Raises:
            ScoringError: They don't.
        """
        with self.recording() as own:
            forward(None)
        others = (own[0] + self.num_experts // 2) % self.num_experts
        with self.recording() as used, self._checking():
            forward(others)
        if not torch.equal(used[0], others):
            raise ScoringError(f"{self._family} doesn't route tokens to the experts that it is given; {_SWITCH_OFF}")

    @contextmanager
    def _checking(self) -> Iterator[None]:
        for router in self._routers:
            router.checks_weights = True
        try:
            yield
        finally:
            for router in self._routers:
                router.checks_weights = False

    def _find(self, layer: nn.Module) -> Iterator[Any]:
        for block in layer.modules():
            if not isinstance(getattr(block, "experts", None), nn.Module):
                continue
            router = next((found for name in _ROUTERS if (found := getattr(block, name, None)) is not None), None)
            if not all(isinstance(getattr(router, name, None), int) for name in ("num_experts", "top_k")):
                raise self._refusal(f"has no router next to the experts of its {type(block).__name__}")
            yield router

    def _wrap(self, router: Any, hidden_size: int) -> "_Router":
        """Replace a router's forward, and check on two tokens that it returns the experts that it is given."""
        router.forward = wrapped = _Router(router.forward, self.num_experts, self.num_chosen, self._family)
        weight = next(router.parameters())
        tokens = torch.zeros(2, hidden_size, dtype=weight.dtype, device=weight.device)
        wrapped.given = torch.arange(self.num_chosen, device=weight.device).expand(2, -1)
        try:
            with torch.no_grad():
                output = wrapped(tokens)
        except (ScoringError, RuntimeError, TypeError, ValueError, IndexError) as error:
            raise self._refusal(f"has routers that can't be given experts ({error})") from error
        if not isinstance(output, tuple) or all(each is not wrapped.given for each in output):
            raise self._refusal("has routers that don't return the experts that they choose")
        wrapped.given = None
        return wrapped

    def _giving(self, routers: list[int]) -> Callable[..., tuple[Any, dict[str, Any]]]:
        """Return a hook of a layer, which also runs when gradient checkpointing computes the layer again."""

        def give(_: nn.Module, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            options = dict(options)
            experts: Tensor | None = options.pop(ROUTED_EXPERTS, None)
            for at in routers:
                first = at * self.num_chosen
                given = None if experts is None else experts[:, first : first + self.num_chosen].long()
                self._routers[at].given = given
            return arguments, options

        return give

    def _refusal(self, reason: str) -> ModelError:
        return ModelError(
            f"rollout.router_replay = true, but a model of the family {self._family} {reason}; set it to false"
        )


_SWITCH_OFF = "set rollout.router_replay = false"


class _Router:
    """A router's forward, which records the experts that it chooses, or uses those that it is given."""

    def __init__(self, forward: Callable[..., Any], num_experts: int, num_chosen: int, family: str) -> None:
        self._forward, self._num_experts, self._num_chosen, self._family = forward, num_experts, num_chosen, family
        self.given: Tensor | None = None  # [T, K] int64
        self.record: list[Tensor] | None = None
        self.checks_weights = False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.given is None and self.record is None:
            return self._forward(*arguments, **options)
        with _Choice(self._num_experts, self._num_chosen, self.given) as choice:
            output = self._forward(*arguments, **options)
        if len(choice.made) != 1:
            raise ScoringError(
                f"a router of {self._family} chose experts by {len(choice.made)} calls of torch.topk, expected 1; "
                f"{_SWITCH_OFF}"
            )
        if self.record is not None:
            self.record += choice.made
        if self.checks_weights:
            self._check_weights(output, choice.made[0])
        return output

    def _check_weights(self, output: tuple[Any, ...], chosen: Tensor) -> None:
        weights = [each for each in output if each.is_floating_point() and each.shape == chosen.shape]
        if not all((each.isfinite() & (each != 0)).all() for each in weights):
            raise ScoringError(
                f"a router of {self._family} gives no weight to experts of groups that it doesn't prefer; {_SWITCH_OFF}"
            )


class _Choice(TorchFunctionMode):
    """Sees, or replaces, a router's choice of K of E experts by `torch.topk`; not its choices of groups of experts."""

    def __init__(self, num_experts: int, num_chosen: int, given: Tensor | None) -> None:
        super().__init__()
        self._shape, self._given = (num_experts, num_chosen), given
        self.made: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        scores = args[0]
        if scores.ndim != 2 or (scores.shape[-1], result.indices.shape[-1]) != self._shape:
            return result
        if self._given is not None:
            result = torch.return_types.topk((scores.gather(-1, self._given), self._given))
        self.made.append(result.indices)
        return result
