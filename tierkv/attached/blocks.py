"""An engine's block ids, checked before anything moves."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tierkv.attached.views import domains
from tierkv.errors import InvalidInputError

if TYPE_CHECKING:
    from tierkv.attached.copies import BlockIds
    from tierkv.attached.flights import Block
    from tierkv.attached.views import GroupView


class PoolBlocks:
    """The blocks of an attached pool, by layer group.

    Attributes:
        views: where they lie.
    """

    def __init__(self, views: Sequence[GroupView]) -> None:
        self.views = tuple(views)
        # Groups that lie in the same memory cannot use one block id at the same time.
        self._domains = domains(views)

    def split(
        self, numbers: Sequence[range], blocks: Sequence[Sequence[Any]]
    ) -> list[list[list[int | None]]]:
        """Return the ids of a load by group and page.

        Args:
            numbers: the pages to load, by group.
            blocks: their blocks' ids, by group; None for a block to leave alone.

        Raises:
            InvalidInputError: not as many as the pages have, or ids that are not in the pool.
        """
        if len(blocks) != len(self.views):
            raise InvalidInputError(
                f"load: block ids for {len(blocks)} layer groups, but there are {len(self.views)}"
            )
        split = []
        for view, pages, ids in zip(self.views, numbers, blocks, strict=True):
            size = view.blocks_per_page
            _must_be_a_list("load", ids)
            if len(ids) != len(pages) * size:
                raise InvalidInputError(
                    f"load: layer group {view.group.name!r}: {len(ids)} block ids, but pages "
                    f"[{pages.start}, {pages.stop}) have {len(pages)} * {size} blocks"
                )
            where = f"load: layer group {view.group.name!r}"
            checked = [None if block is None else _checked(view, where, block) for block in ids]
            split.append([checked[at : at + size] for at in range(0, len(checked), size)])
        return split

    def whole(self, groups: Sequence[int], blocks: Sequence[Sequence[Any]]) -> list[list[int]]:
        """Return the ids of a save, by page.

        Args:
            groups: the layer group of each page.
            blocks: the ids of each page's blocks.

        Raises:
            InvalidInputError: not as many as a page has, or ids that are not in the pool.
        """
        if len(groups) != len(blocks):
            raise InvalidInputError(f"save: {len(groups)} pages, but blocks of {len(blocks)}")
        checked = []
        for group, ids in zip(groups, blocks, strict=True):
            view = self.views[group]
            where = f"save: layer group {view.group.name!r}"
            _must_be_a_list("save", ids)
            if len(ids) != view.blocks_per_page:
                raise InvalidInputError(
                    f"{where}: a page has {view.blocks_per_page} blocks, got ids {list(ids)}"
                )
            checked.append([_checked(view, where, block) for block in ids])
        return checked

    def named(self, name: str, pages: Sequence[tuple[int, BlockIds]]) -> frozenset[Block]:
        """Return the blocks that a call names.

        Args:
            name: what the caller does, for the message.
            pages: (layer group, ids of its blocks) of each page.

        Raises:
            InvalidInputError: one of them is named twice.
        """
        named = [
            (self._domains[group], block)
            for group, ids in pages
            for block in ids
            if block is not None
        ]
        once = frozenset(named)
        if len(once) < len(named):
            twice = sorted({block for (_, block), count in Counter(named).items() if count > 1})
            raise InvalidInputError(f"{name}: block ids {twice} are named twice")
        return once


def _checked(view: GroupView, where: str, block: Any) -> int:
    try:
        number = operator.index(block)
    except TypeError as error:
        raise InvalidInputError(f"{where}: a block id must be an integer, got {block!r}") from error
    if not 0 <= number < view.num_blocks:
        raise InvalidInputError(f"{where}: block id {number} is not in [0, {view.num_blocks})")
    return number


def _must_be_a_list(name: str, ids: Any) -> None:
    if not hasattr(ids, "__len__"):
        raise InvalidInputError(
            f"{name}: expected a list of block ids, got {type(ids).__name__}; a single block that "
            "shall be left alone is None inside the list"
        )
