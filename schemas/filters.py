"""Filters on the columns of a media table: `score > 5 and licence in ('cc0', 'cc-by')`. Pure.

The grammar is a small part of Python's: comparisons, `in`, `not in`, `and`, `or`, `not`, `is None`, numbers, text,
True and False. A name is a column of the manifest (or width, height, frames, rate, duration, size, kind, path); one
that is no Python name stands in backquotes: `` `punsafe (nsfw)` < 0.1 ``. Where a value is missing, a comparison
is neither true nor false, and the item is left out.
"""

import ast
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.tables import EXTRA_PREFIX

BUILTIN_COLUMNS = ("path", "size", "kind", "width", "height", "frames", "rate", "duration")

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
}
_QUOTED = re.compile(r"`([^`]+)`")
_PLACEHOLDER = "_quoted_column_"


class Filter:
    """A filter, parsed. Raises ValueError, which says what is not understood."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._quoted: list[str] = []
        try:
            self._tree = ast.parse(_QUOTED.sub(self._placeholder, text).strip(), mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"{text!r} can't be read ({error.msg}); write it as in: score > 5") from error
        self.columns = sorted({self._name(node) for node in ast.walk(self._tree) if isinstance(node, ast.Name)})
        empty = pa.table({EXTRA_PREFIX + name: pa.array([], pa.null()) for name in self.columns})
        self._evaluate(self._tree, empty, dry=True)

    def mask(self, table: pa.Table) -> pa.BooleanArray:
        """Which rows pass. Raises ValueError for an unknown column or one of another kind than it is compared with."""
        found = self._evaluate(self._tree, table)
        if not isinstance(found, pa.Array | pa.ChunkedArray) or not pa.types.is_boolean(found.type):
            raise ValueError(f"{self.text!r} is no comparison; write it as in: score > 5")
        passed = pc.fill_null(found, False)
        return passed.combine_chunks() if isinstance(passed, pa.ChunkedArray) else passed

    def _placeholder(self, match: re.Match[str]) -> str:
        self._quoted.append(match[1])
        return f"{_PLACEHOLDER}{len(self._quoted) - 1}"

    def _name(self, node: ast.Name) -> str:
        place = node.id.removeprefix(_PLACEHOLDER)
        return self._quoted[int(place)] if place != node.id else node.id

    def _evaluate(self, node: ast.expr, table: pa.Table, dry: bool = False) -> Any:
        """The value of a part: a column, a mask or a constant. dry: only see that it is understood."""
        match node:
            case ast.Name():
                return self._column(self._name(node), table)
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                value = self._evaluate(operand, table, dry)
                return value if dry else self._called(lambda mask, _: pc.invert(mask), value, None)
            case ast.BoolOp(op=op, values=values):
                parts = [self._evaluate(value, table, dry) for value in values]
                join = pc.and_kleene if isinstance(op, ast.And) else pc.or_kleene
                while not dry and len(parts) > 1:
                    parts[:2] = [self._called(join, parts[0], parts[1])]
                return parts[0]
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                return [self._evaluate(item, table, dry) for item in items]
            case ast.Compare(left=left, ops=ops, comparators=others):
                return self._comparison([left, *others], ops, table, dry)
        raise ValueError(
            f"{self.text!r}: {ast.unparse(node)!r} is not understood; valid: comparisons, in, and, or, not"
        )

    def _comparison(self, operands: list[ast.expr], ops: list[ast.cmpop], table: pa.Table, dry: bool) -> Any:
        nothing = any(isinstance(operand, ast.Constant) and operand.value is None for operand in operands)
        if nothing and not all(isinstance(op, ast.Is | ast.IsNot) for op in ops):
            raise ValueError(f"{self.text!r}: nothing is equal to None; write `column is None` or `is not None`")
        values = [self._evaluate(operand, table, dry) for operand in operands]
        found = None
        for op, left, right in zip(ops, values, values[1:], strict=False):
            if dry:
                continue
            one = self._compared(op, left, right)
            found = one if found is None else pc.and_kleene(found, one)
        return found

    def _compared(self, op: ast.cmpop, left: Any, right: Any) -> Any:
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, list) or isinstance(left, list | str | int | float | None):
                raise ValueError(f"{self.text!r}: write `column in (value, value)`")
            inside = self._called(
                lambda column, values: pc.is_in(column, value_set=_cast_like(column, values)), left, right
            )
            inside = pc.if_else(pc.is_valid(left), inside, pa.scalar(None, pa.bool_()))
            return inside if isinstance(op, ast.In) else pc.invert(inside)
        if isinstance(op, ast.Is | ast.IsNot):
            return pc.is_null(left) if isinstance(op, ast.Is) else pc.is_valid(left)
        return self._called(_COMPARE[type(op)], left, right)

    def _called(self, function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        try:
            return function(left, right)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError) as error:
            kinds = " and ".join(str(getattr(side, "type", type(side).__name__)) for side in (left, right))
            raise ValueError(f"{self.text!r}: {kinds} can't be compared; put text in quotes, numbers not") from error

    def _column(self, name: str, table: pa.Table) -> pa.ChunkedArray:
        if EXTRA_PREFIX + name in table.column_names:
            return table.column(EXTRA_PREFIX + name)
        if name in BUILTIN_COLUMNS and name in table.column_names:
            return table.column(name)
        known = [column.removeprefix(EXTRA_PREFIX) for column in table.column_names if column.startswith(EXTRA_PREFIX)]
        raise ValueError(
            f"{self.text!r}: there is no column {name!r}; there are: {', '.join([*known, *BUILTIN_COLUMNS])}"
        )


def _cast_like(column: Any, values: list[Any]) -> pa.Array:
    return pa.array(values).cast(column.type)
