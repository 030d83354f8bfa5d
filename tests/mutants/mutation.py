"""Small bugs: where in a source file one can be planted, and the file with one planted."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

_COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
_CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutation:
    """One bug that can be planted in a file.

    Attributes
    ----------
    index : int
        Its place among all of the file, in order of the source.
    line : int
        Where.
    change : str
        What: old and new code.
    """

    index: int
    line: int
    change: str

    def planted(self, source: str) -> ast.Module:
        """Return the tree of its file with the bug."""
        return planted(source, self.index)


def mutations(source: str) -> list[Mutation]:
    """Return every bug that can be planted in a source file.

    Left out is what no test should check: annotations, docstrings, texts of errors, decorators,
    ``strict`` of a zip, code below ``if TYPE_CHECKING``, tables of a module (datasheets are data).
    """
    planter = _Planter(None)
    planter.visit(ast.parse(source))
    return planter.sites


def planted(source: str, index: int) -> ast.Module:
    """Return the tree of a source file with one of its `mutations`."""
    planter = _Planter(index)
    tree = planter.visit(ast.parse(source))
    if not planter.done:
        raise IndexError(f"the file has no mutation {index}")
    return ast.fix_missing_locations(tree)


class _Planter(ast.NodeTransformer):
    """Walks a tree in one order; lists what can be changed, or changes one of it."""

    def __init__(self, wanted: int | None) -> None:
        self.wanted = wanted
        self.sites: list[Mutation] = []
        self.done = False

    def _site(self, node: ast.AST, old: ast.AST, new: ast.AST) -> bool:
        """Note a site, and say whether it is the wanted one."""
        index = len(self.sites)
        change = f"{_text(old)} -> {_text(new)}"
        self.sites.append(Mutation(index, getattr(node, "lineno", 0), change))
        if index == self.wanted:
            self.done = True
            return True
        return False

    # -- what is left alone ---------------------------------------------------------------------

    def visit_Module(self, node: ast.Module) -> ast.AST:
        node.body = [self._of_module(statement) for statement in node.body]
        return node

    def _of_module(self, statement: ast.stmt) -> ast.stmt:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        table = isinstance(value, ast.Tuple | ast.List | ast.Dict | ast.Set | ast.DictComp)
        changed: ast.stmt = statement if table else self.visit(statement)
        return changed

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        node.defaults = [self.visit(value) for value in node.defaults]
        node.kw_defaults = [value and self.visit(value) for value in node.kw_defaults]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.args = self.visit(node.args)
        node.body = self._statements(node.body)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = self._statements(node.body)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_If(self, node: ast.If) -> Any:
        if _text(node.test) == "TYPE_CHECKING":
            return node
        if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            negated = ast.UnaryOp(ast.Not(), node.test)
            if self._site(node.test, node.test, negated):
                node.test = ast.copy_location(negated, node.test)
                return node
        node.test = self.visit(node.test)
        node.body = self._statements(node.body)
        node.orelse = self._statements(node.orelse)
        return node

    def _statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        changed = [self.visit(statement) for statement in body]
        return [statement for statement in changed if statement is not None] or [ast.Pass()]

    # -- what is changed ------------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant):
            return node
        if isinstance(node.value, ast.Call) and self._site(node, node, ast.Pass()):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if any(_text(target).startswith("__") for target in node.targets):
            return node
        if isinstance(node.targets[0], ast.Attribute) and self._site(node, node, ast.Pass()):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if self._site(node, node, ast.Pass()):
            return ast.copy_location(ast.Pass(), node)
        node.value = self.visit(node.value)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        for at, op in enumerate(node.ops):
            other = _COMPARED[type(op)]()
            new = ast.Compare(
                node.left, [*node.ops[:at], other, *node.ops[at + 1 :]], node.comparators
            )
            if self._site(node, node, new):
                return ast.copy_location(new, node)
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        new = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
        if self._site(node, node, new):
            return ast.copy_location(new, node)
        return self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, ast.Not | ast.USub) and self._site(node, node, node.operand):
            return node.operand
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        other = _COMPUTED.get(type(node.op))
        if other is not None:
            new = ast.BinOp(node.left, other(), node.right)
            if self._site(node, node, new):
                return ast.copy_location(new, node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in _CALLED:
            new = ast.Call(ast.Name(_CALLED[node.func.id], ast.Load()), node.args, node.keywords)
            if self._site(node, node, new):
                return ast.copy_location(new, node)
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        # zip(strict=True) is an assertion: where it holds, nothing shows whether it is there.
        return node if node.arg == "strict" else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        value = node.value
        if isinstance(value, bool):
            other: object = not value
        elif isinstance(value, int):
            other = value + 1
        elif isinstance(value, float):
            other = 2 * value if value else 1.0
        else:
            return node
        new = ast.Constant(other)
        return ast.copy_location(new, node) if self._site(node, node, new) else node


def _text(node: ast.AST) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else f"{text[:57]}..."
