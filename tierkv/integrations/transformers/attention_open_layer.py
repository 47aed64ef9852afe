"""One layer's pages, from the update that writes a new token until attention has read them."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tierkv.data_plane.layer_view import LayerView

_ATTRIBUTE = "_tierkv_open_layer"


class OpenLayer:
    """The gates of all rows of a batch, entered; attention finds it by the keys it is given.

    A layer that is spilled leaves its buffers when its gate is left, so the gates stay
    entered in between: leaving twice would bring it in twice.

    Attributes:
        layer: the model layer.
        views: one a row, usable until this is closed.
    """

    __slots__ = ("_gates", "layer", "views")

    def __init__(self, layer: int, views: Sequence[LayerView]) -> None:
        self.layer = layer
        self.views = views
        self._gates: ExitStack | None = ExitStack()

    def append(self, states: Sequence[Tensor]) -> None:
        """Enter the gates and write new states ``[rows, heads, tokens, dim]`` into the pages."""
        assert self._gates is not None, "an open layer is written once"
        try:
            for number, view in enumerate(self.views):
                self._gates.enter_context(view)
                view.append(*(state[number] for state in states))
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether attention has read the pages."""
        return self._gates is None

    def attach(self, keys: Tensor) -> None:
        """Let the attention function find this by the keys that it is given."""
        setattr(keys, _ATTRIBUTE, self)

    @staticmethod
    def of(keys: Tensor) -> OpenLayer | None:
        """Return what was attached to these very keys; views and copies carry nothing."""
        return getattr(keys, _ATTRIBUTE, None)

    def close(self) -> None:
        """Leave the gates; harmless when left."""
        gates, self._gates = self._gates, None
        if gates is not None:
            gates.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the gates."""
        self.close()
