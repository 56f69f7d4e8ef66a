"""Jinja for templates that nobody here wrote: no way to Python's internals, and bounded work.

A template may come with a model file, so it is code from a stranger. The sandbox refuses what could leave
it; a count of steps ends loops and recursion that would run for ever; a limit on sizes ends output and
values that grow without end. Filters that can blow up a text by themselves (`center`, `indent`, `replace`,
`format`) are bounded only in what is written out.

The output says which characters the template wrote itself: its constants are texts of that origin (see
`origins`), and what joins texts keeps their origins. Does not know messages.
"""

import json
from collections.abc import Iterable, Sized
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes, pass_environment
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from legato.text.origins import Origin, Written, joined, written

MAX_STEPS = 5_000_000
"""Rounds of loops in one rendering, a call being worth CALL_STEPS of them: a few seconds at most."""
CALL_STEPS = 10
MAX_CHARS = 20_000_000
"""Length of the output, and of a text or list that an expression makes."""
MAX_BITS = 4096
"""Size of a whole number that an expression makes."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template, which it renders once at a time: the steps are counted here."""

    intercepted_binops = frozenset({"+", "*", "**"})
    concat = staticmethod(partial(joined, ""))

    def __init__(self) -> None:
        # Not optimized: constant expressions must be computed under the limits, not by the compiler.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[LoopControlExtension, _Generation],
        )
        self.constants: list[str] = []
        """The texts of the template's source, of its origin."""
        self._num_steps = 0
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _to_json
        self.filters["counted"] = self._counted
        self.filters["joined"] = _joined
        self.filters["join"] = _join
        self.filters["safe"] = str  # nothing is escaped, so there is nothing to be safe from

    def compile_bounded(self, tree: nodes.Template) -> Template:
        """A template that keeps the limits, made from its syntax tree."""
        bounded = _Marking(self.constants).visit(_Bounding().visit(tree))
        return self.template_class.from_code(self, self.compile(bounded), self.make_globals(None))

    def render(self, template: Template, variables: dict[str, object]) -> Written:
        """The template's output. Texts in `variables` that have no origin count as a client's. Raises
        TemplateError at a limit, and whatever the template raises."""
        self._num_steps = 0
        parts, num_chars = [], 0
        for part in template.generate(variables):
            num_chars += len(part)
            _check_size(num_chars, MAX_CHARS)
            parts.append(part)
        return joined("", parts)

    # The signatures of these two are the library's.
    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._spend(CALL_STEPS)
        return super().call(context, callee, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            _check_size(bits, MAX_BITS)
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _check_size(len(left) + len(right), MAX_CHARS)
        elif operator == "*" and isinstance(left, Sized) and isinstance(right, int):
            _check_size(len(left) * right, MAX_CHARS)
        elif operator == "*" and isinstance(left, int) and isinstance(right, Sized):
            _check_size(left * len(right), MAX_CHARS)
        return super().call_binop(context, operator, left, right)

    def _counted(self, items: Iterable[object]) -> Iterable[object]:
        """`items` of a loop, paid for in advance."""
        if not isinstance(items, Sized):
            items = list(items)
        self._spend(len(items))
        return items

    def _spend(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise TemplateError(f"rendering takes more than {MAX_STEPS} steps")


class _Generation(Extension):
    """`{% generation %}`, by which templates mark the model's own turns for training: its body alone."""

    tags = {"generation"}  # noqa: RUF012 (the library declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Bounding(NodeTransformer):
    """Puts every loop and every joining of texts under a limit."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 (the library finds it by this name)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "joined")


class _Marking(NodeTransformer):
    """Takes every text of the source out of the code, to where it has an origin."""

    def __init__(self, constants: list[str]) -> None:
        self._constants = constants

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        return self._constant(node.value, node.lineno) if isinstance(node.value, str) else node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        return self._constant(node.data, node.lineno)

    def _constant(self, text: str, lineno: int) -> nodes.Node:
        """`environment.constants[number]`"""
        self._constants.append(written(text, Origin.TEMPLATE))
        number = nodes.Const(len(self._constants) - 1, lineno=lineno)
        return nodes.Getitem(nodes.EnvironmentAttribute("constants"), number, "load", lineno=lineno)


def _filtered(value: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _joined(values: list[object]) -> str:
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)), MAX_CHARS)
    return joined("", texts)


@pass_environment
def _join(
    environment: Environment, values: Iterable[object], separator: str = "", attribute: str | None = None
) -> str:
    """Jinja's own filter, but it keeps origins."""
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    return joined(str(separator), [str(value) for value in values])


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise TemplateError(f"a value of size {size} is made; the limit is {limit}")


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's filter writes it: nothing escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
