"""Pages of the site that are generated from the code: configuration, commands, metrics and columns.

In any other page, a line `<!-- kinds: SECTION -->` becomes the table of that config section's kinds, and `<!-- pipeline
-->` that of a pipeline's keys. MkDocs calls
`on_files` before it reads the pages, and `on_page_markdown` for each page; see
https://www.mkdocs.org/user-guide/configuration/#hooks.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Iterator
from inspect import cleandoc
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from flows.cli.main import app
from schemas.catalog import CATALOG
from schemas.config.kinds import kind_of
from schemas.config.pipeline import PipelineConfig, StageConfig
from schemas.config.run import RunConfig
from schemas.metric_catalog import METRICS

MAX_TYPE_CHARACTERS = 60
CONFIGURATION = "reference/configuration.md"
PIPELINE = "<!-- pipeline -->"
KINDS = re.compile(r"^<!-- kinds: (\w+) -->$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages: dict[str, Callable[[], str]] = {
        CONFIGURATION: configuration_page,
        "reference/commands.md": commands_page,
        "reference/metrics.md": metrics_page,
        "reference/columns.md": columns_page,
    }
    for name, make in pages.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert the tables of kinds."""
    target = "../" * page.file.src_uri.count("/") + CONFIGURATION
    if PIPELINE in markdown:
        markdown = markdown.replace(PIPELINE, "\n".join(pipeline_table()))
    return KINDS.sub(lambda found: "\n".join(_kinds(found[1], target)), markdown)


def pipeline_table() -> list[str]:
    """Return the table of the keys of a pipeline's file, with those of a stage."""
    return [*_table(PipelineConfig), *_rows(StageConfig, "stages.STAGE", sections=True)]


def configuration_page() -> str:
    """Return every key of a run's configuration with its type, default and meaning."""
    lines = [
        "# Configuration",
        "",
        "Every key of a run's TOML file, as `sluice train` reads it. `section.key=value` on the command line wins over "
        "the file. Unknown keys and values that are not allowed are rejected before anything starts. This page is "
        "generated from `schemas/config`.",
        "",
        "## The run",
        "",
        *_table(RunConfig, sections=False),
    ]
    for name, field in RunConfig.model_fields.items():
        if members := _models(field.annotation):
            heading = f"[[{name}]]" if _is_list(field) else f"[{name}]"
            lines += ["", f"## `{heading}` {{#{name}}}", "", *_section(name, members)]
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """Return the help of every command."""
    group = typer.main.get_command(app)
    context = typer.Context(group, info_name="sluice")
    lines = [
        "# Command line",
        "",
        "As `sluice COMMAND --help` prints it. Exit codes: 0 done; 1 the run stopped, and the line "
        "that resumes it was printed; 2 something to fix, in one line that says where and how.",
        "",
    ]
    for name in group.list_commands(context):  # type: ignore[attr-defined]
        command = group.get_command(context, name)  # type: ignore[attr-defined]
        lines += [f"## `sluice {name}`", "", cleandoc(command.help or ""), "", *_parameters(command), ""]
    return "\n".join(lines)


def metrics_page() -> str:
    """Return the metric catalog."""
    lines = [
        "# Metrics",
        "",
        "What `metrics.jsonl` holds of every step, and what the terminal, the report and the Prefect UI show of it; "
        "`report` names the panel, which is also the row of the Grafana dashboard. This page is generated from "
        "`schemas/metric_catalog.py`.",
        "",
        "| metric | unit | reduction | stage | meaning | shown in |",
        "|---|---|---|---|---|---|",
    ]
    for spec in METRICS.values():
        shown = ", ".join(f"report ({spec.panel})" if view == "report" else view for view in spec.views)
        lines.append(
            f"| `{spec.name}` | {spec.unit} | {spec.reduction} | {spec.stage} | {_cell(spec.meaning)} | {shown} |"
        )
    return "\n".join(lines) + "\n"


def columns_page() -> str:
    """Return the column catalog."""
    lines = [
        "# Columns",
        "",
        "The only columns there are. `row` columns have one value per sample; `prompt` and `response` columns are "
        "jagged: one list per sample, of tokens; `turn` columns have one "
        "value for each of the model's turns. `reward_<part>` columns are like `reward`. This page is generated from "
        "`schemas/catalog.py`.",
        "",
        "| column | axis | dtype | unit | produced by | null allowed |",
        "|---|---|---|---|---|---|",
    ]
    for spec in CATALOG.values():
        nullable = "yes" if spec.nullable else ""
        dtypes = " or ".join(spec.dtypes) + (", a vector for each token" if spec.is_vector else "")
        lines.append(f"| `{spec.name}` | {spec.axis} | {dtypes} | {spec.unit} | {spec.producer} | {nullable} |")
    return "\n".join(lines) + "\n"


def _section(name: str, members: list[type[BaseModel]]) -> Iterator[str]:
    """Yield a section; one that has kinds gets a part for each kind."""
    if len(members) == 1:
        yield cleandoc(members[0].__doc__ or "")
        yield ""
        yield from _table(members[0], place=name)
        return
    yield _default_kinds(name)
    yield ""
    yield from _kinds(name)
    for member in members:
        yield ""
        yield f'### `{name}.kind = "{kind_of(member)}"` {{#{name}-{kind_of(member)}}}'
        yield ""
        yield cleandoc(member.__doc__ or "")
        yield ""
        yield from _table(member, place=name)


def _kinds(section: str, page: str = "") -> Iterator[str]:
    """Yield the table of a section's kinds: the first paragraph of each class's docstring, with a link to its keys."""
    yield "| kind | meaning |"
    yield "|---|---|"
    for member in _models(RunConfig.model_fields[section].annotation):
        kind, (meaning, *_) = kind_of(member), cleandoc(member.__doc__ or "").split("\n\n")
        yield f"| [`{kind}`]({page}#{section}-{kind}) | {_cell(meaning)} |"


def _default_kinds(section: str) -> str:
    """Return the kinds that apply without the section, and in a section without a `kind`."""
    field = RunConfig.model_fields[section]
    if _is_list(field):
        return f"{field.description} Each has a `kind`."
    if field.is_required():
        return f"`{section}.kind` must be given."
    default = field.get_default(call_default_factory=True)
    if default is None:
        return f"{field.description} If the section is there, `{section}.kind` must be given."
    absent = kind_of(type(default))
    unnamed = [each.func({})["kind"] for each in field.metadata if isinstance(each, BeforeValidator)]
    if unnamed in ([], [absent]):
        return f'`{section}.kind` is `"{absent}"` by default.'
    return f'`{section}.kind` is `"{absent}"` without the section, and by default `"{unnamed[0]}"` within it.'


def _table(model: type[BaseModel], place: str = "", sections: bool = True) -> Iterator[str]:
    rows = list(_rows(model, place, sections))
    if not rows:
        yield "It has no other keys."
        return
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    yield from rows


def _rows(model: type[BaseModel], place: str, sections: bool, kind: str = "") -> Iterator[str]:
    """Yield a row for each key; those of a section with kinds within another one say theirs."""
    for name, field in model.model_fields.items():
        if name == "kind":
            continue
        nested = _models(field.annotation)
        if nested and not sections:
            continue
        key = f"{place}.{name}" if place else name
        meaning = f"{kind}{_cell(field.description or '')}"
        yield f"| `{key}` | {_cell(_type(field))} | {_cell(_default(field))} | {meaning} |"
        if len(nested) == 1:
            yield from _rows(nested[0], key, sections)
        elif nested:
            kinds = " or ".join(f'`"{kind_of(each)}"`' for each in nested)
            yield f"| `{key}.kind` | {kinds} | {_default_kind(field)} | Selects one of these. |"
            for each in nested:
                yield from _rows(each, key, sections, f"`{kind_of(each)}`: ")


def _models(annotation: object) -> list[type[BaseModel]]:
    """Return the config classes that a field may hold."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _models(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [model for member in get_args(annotation) for model in _models(member)]
    if origin is tuple and get_origin(get_args(annotation)[0]) is Annotated:  # a list of sections with kinds
        return _models(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return []


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _type(field: FieldInfo) -> str:
    text = _name(field.annotation)
    limits = [
        f"{sign} {value}"
        for limit in field.metadata
        for name, sign in {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}.items()
        if (value := getattr(limit, name, None)) is not None
    ]
    return ", ".join([text, *limits])


def _name(annotation: object) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _name(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{_toml(value)}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_name(argument) for argument in arguments)
    if origin in (tuple, list):
        return f"list of {_name(arguments[0])}"
    if origin is dict:
        return f"table of {_name(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names: dict[Any, str] = {
        Any: "any value",
        type(None): "none",
        str: "string",
        int: "integer",
        float: "number",
        bool: "true or false",
    }
    return names.get(annotation, str(getattr(annotation, "__name__", annotation)))[:MAX_TYPE_CHARACTERS]


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        value = field.default_factory()  # type: ignore[call-arg]
        return "" if isinstance(value, BaseModel) else f"`{_toml(value)}`"
    if field.default is PydanticUndefined:
        return "required"
    return "none" if field.default is None else f"`{_toml(field.default)}`"


def _default_kind(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    return f'`"{kind_of(type(default))}"`' if isinstance(default, BaseModel) else "required"


def _toml(value: object) -> str:
    """Return a default as it is written in a TOML file."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | str):
        return json.dumps(value)
    return repr(value)


def _parameters(command: Any) -> Iterator[str]:
    rows = []
    for parameter in command.params:
        if parameter.name == "help" or getattr(parameter, "hidden", False):
            continue
        is_option = parameter.param_type_name == "option"
        shown = parameter.opts[0] if is_option else parameter.metavar or (parameter.name or "").upper()
        rows.append(f"| `{shown}` | {_cell(getattr(parameter, 'help', '') or '')} |")
    if rows:
        yield "| argument | meaning |"
        yield "|---|---|"
        yield from rows


def _cell(text: str) -> str:
    """Return text as it may stand in a Markdown table."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))
