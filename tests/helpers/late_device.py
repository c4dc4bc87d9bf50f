"""Parts of an engine for tests of steps: a device that answers late, recordings, stop strings, and what is launched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from batchgen.engine.replay import Fetched


class Device:
    """Gives a step's ids once, in order, and never has more than two steps: one that runs and the one behind it."""

    def __init__(self) -> None:
        self.num_launched = 0
        self.num_waits = 0
        self.num_ahead = 0  # waits during which another step was under way

    def __call__(self, token_ids: Tensor) -> Fetched:
        """See ``fetch_ids``."""
        assert self.num_launched - self.num_waits <= 1, "a third step was launched"
        step, ids = self.num_launched, token_ids.tolist()
        self.num_launched += 1

        def wait() -> list[int]:
            assert step == self.num_waits, "waited for twice, or in another order"
            self.num_waits += 1
            self.num_ahead += self.num_launched > self.num_waits
            return ids

        return wait


class Again:
    """Runs the work while recording, as warming up does, and again at every replay, with one result tensor."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], Tensor]]:
        self.num_recorded += 1
        result = work()

        def replay() -> Tensor:
            result.copy_(work())
            return result

        return result, replay


class SomeTokens:
    """Takes some tokens to complete a stop string."""

    def push(self, token_id: int) -> str | None:
        """See ``StopMatcher``."""
        return "any" if token_id % 8 == 5 else None


class Operations(TorchDispatchMode):
    """Counts torch's operations by name, each about a launch on a GPU; not those that compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.found[name] += not func.is_view and "empty" not in name
        return func(*args, **(kwargs or {}))
