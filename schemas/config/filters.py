"""Filters on the columns of a media table: `score > 5 and license in ('cc0', 'cc-by')`. Pure.

The grammar is a small part of Python's: comparisons, `in`, `not in`, `and`, `or`, `not`, `is null`, numbers, text,
True and False. A name is a column of the manifest or one of BUILTIN_COLUMNS; a name that is not valid in Python is
written in backquotes: `` `punsafe (nsfw)` < 0.1 ``. A comparison with a missing value is neither true nor false: the
item is excluded.
"""

import ast
import re
from collections.abc import Callable, Collection
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from schemas.tables import EXTRA_PREFIX, FEATURE_COLUMNS

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


class _NullNames(ast.NodeTransformer):
    """Reads `is null` and `is not null`, as SQL has them, as `is None` and `is not None`."""

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        for number, (op, value) in enumerate(zip(node.ops, node.comparators, strict=True)):
            if isinstance(op, ast.Is | ast.IsNot) and isinstance(value, ast.Name) and value.id.lower() == "null":
                node.comparators[number] = ast.copy_location(ast.Constant(None), value)
        self.generic_visit(node)
        return node


def feature_columns(text: str | None, columns: Collection[str] = ()) -> list[str]:
    """The FEATURE_COLUMNS that a filter names. columns: media table columns, which take precedence over equal names."""
    names = () if text is None else Filter(text).columns
    return [name for name in names if name in FEATURE_COLUMNS and EXTRA_PREFIX + name not in columns]


class Filter:
    """A parsed filter. ValueError if the syntax is not supported."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._quoted = list(dict.fromkeys(_QUOTED.findall(text)))
        python = _QUOTED.sub(lambda match: f"{_PLACEHOLDER}{self._quoted.index(match[1])}", text)
        try:
            self._tree = ast.parse(python.strip(), mode="eval").body
        except SyntaxError as error:
            raise ValueError(f"{text!r} is not a filter ({error.msg}); write for example: score > 5") from error
        self._tree = _NullNames().visit(self._tree)
        self.columns = sorted({self._name(node) for node in ast.walk(self._tree) if isinstance(node, ast.Name)})
        empty = pa.table({EXTRA_PREFIX + name: pa.array([], pa.null()) for name in self.columns})
        self._evaluate(self._tree, empty, dry=True)

    def mask(self, table: pa.Table) -> pa.BooleanArray:
        """(n,) mask of the rows that pass. ValueError for an unknown column, or a comparison of different types."""
        result = self._evaluate(self._tree, table)
        if not isinstance(result, pa.Array | pa.ChunkedArray) or not pa.types.is_boolean(result.type):
            raise ValueError(f"{self.text!r} is not a comparison; write for example: score > 5")
        passed = pc.fill_null(result, False)
        return passed.combine_chunks() if isinstance(passed, pa.ChunkedArray) else passed

    def _name(self, node: ast.Name) -> str:
        number = node.id.removeprefix(_PLACEHOLDER)
        return self._quoted[int(number)] if number != node.id else node.id

    def _evaluate(self, node: ast.expr, table: pa.Table, dry: bool = False) -> Any:
        """The value of a part: a column, a mask or a constant. dry: check the syntax only."""
        match node:
            case ast.Name():
                return self._column(self._name(node), table)
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
                return -value
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                value = self._evaluate(operand, table, dry)
                return value if dry else self._call(lambda mask, _: pc.invert(mask), value, None)
            case ast.BoolOp(op=op, values=values):
                parts = [self._evaluate(value, table, dry) for value in values]
                join = pc.and_kleene if isinstance(op, ast.And) else pc.or_kleene
                return None if dry else reduce(lambda first, second: self._call(join, first, second), parts)
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
                return [self._evaluate(item, table, dry) for item in items]
            case ast.Compare(left=first, ops=ops, comparators=comparators):
                operands = [first, *comparators]
                has_none = any(isinstance(operand, ast.Constant) and operand.value is None for operand in operands)
                if has_none and not all(isinstance(op, ast.Is | ast.IsNot) for op in ops):
                    raise ValueError(
                        f"{self.text!r}: a comparison with None is never true; write `column is None` or `is not None`"
                    )
                values = [self._evaluate(operand, table, dry) for operand in operands]
                return None if dry else reduce(pc.and_kleene, map(self._compare, ops, values, values[1:]))
        raise ValueError(f"{self.text!r}: {ast.unparse(node)!r} is not supported; valid: comparisons, in, and, or, not")

    def _compare(self, op: ast.cmpop, left: Any, right: Any) -> Any:
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, list) or isinstance(left, list | str | int | float | None):
                raise ValueError(f"{self.text!r}: `in` needs a list; write `column in (value, value)`")
            mask = self._call(lambda column, values: pc.is_in(column, pa.array(values).cast(left.type)), left, right)
            mask = pc.if_else(pc.is_valid(left), mask, pa.scalar(None, pa.bool_()))
            return mask if isinstance(op, ast.In) else pc.invert(mask)
        if isinstance(op, ast.Is | ast.IsNot):
            return pc.is_null(left) if isinstance(op, ast.Is) else pc.is_valid(left)
        return self._call(_COMPARE[type(op)], left, right)

    def _call(self, function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        try:
            return function(left, right)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError) as error:
            types = " and ".join(str(getattr(side, "type", type(side).__name__)) for side in (left, right))
            raise ValueError(
                f"{self.text!r}: {types} can't be compared; write text with quotes, and numbers without"
            ) from error

    def _column(self, name: str, table: pa.Table) -> pa.ChunkedArray:
        if EXTRA_PREFIX + name in table.column_names:
            return table.column(EXTRA_PREFIX + name)
        if name in BUILTIN_COLUMNS and name in table.column_names:
            return table.column(name)
        extra = [column.removeprefix(EXTRA_PREFIX) for column in table.column_names if column.startswith(EXTRA_PREFIX)]
        raise ValueError(f"{self.text!r}: no column {name!r}; valid: {', '.join([*extra, *BUILTIN_COLUMNS])}")
